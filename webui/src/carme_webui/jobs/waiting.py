"""What keeps a job waiting and when it may start, as bars from now on."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.translation import until_of
from carme_webui.jobs.spans import Row, Span, Spans

__all__ = ["Waiting", "waiting"]

#: How much of the picture lies behind its last moment: the job's own run, which goes on beyond it.
AFTER = 0.2
#: A start that is nearer needs no notification.
SOON = timedelta(minutes=1)


@dataclass(frozen=True)
class Waiting:
    """The picture.

    Attributes:
        spans: What holds the nodes, where that is known, then the job itself.
        freed: When the nodes become free at the latest, if that is known.
        earliest, latest: The range of the expected start, if that is known.
    """

    spans: Spans
    freed: datetime | None
    earliest: datetime | None
    latest: datetime | None


def waiting(explanation: str, earliest: datetime | None, latest: datetime | None) -> Waiting | None:
    """The picture of a job that waits; None where no time is known that is still to come.

    Args:
        explanation: Why it waits: what its nodes are in use until is in it, where that is known.
        earliest: When it starts if jobs end as early as they lately did.
        latest: When it starts by Slurm's plan.
    """
    now = timezone.now()
    freed = until_of(explanation)
    freed = freed if freed and freed > now + SOON else None
    latest = latest if latest and latest > now + SOON else None
    earliest = max(earliest, now) if earliest and latest and latest - earliest > SOON else None
    last = max((at for at in (freed, latest) if at), default=None)
    if last is None:
        return None
    end = last + (last - now) * AFTER

    rows = []
    if freed:
        rows.append(Row(_("Its nodes"), [Span("queued", _("In use"), now, freed)]))
    if latest:
        spans = [Span("running", _("Running at the latest"), latest, end, is_open=True)]
        if earliest:
            spans.insert(0, Span("staging", _("May start"), earliest, latest))
        rows.append(Row(_("The job"), spans))
    return Waiting(Spans(_("Expected start"), rows, now), freed, earliest, latest)
