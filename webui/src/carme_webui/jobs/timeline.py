"""A job's life as bars over time: queued, staging, running, on each of its nodes."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.jobs import minutes_text
from carme.jobs.nodes import expand
from carme.sessions import Step
from carme_webui.jobs.models import Job
from carme_webui.sessions.models import Session

__all__ = ["WIDTH", "Bar", "Row", "timeline"]

#: The picture's width in its own units.
WIDTH = 1000
#: Bars that are shorter could not be seen.
NARROWEST = 3
MOST_NODES = 16


@dataclass(frozen=True)
class Bar:
    """A span of one kind in a picture that is WIDTH wide."""

    kind: str
    label: str
    start: datetime
    end: datetime
    x: int
    width: int

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.end - self.start).total_seconds()

    @property
    def words(self) -> str:
        """The same in words."""
        seconds = int(self.seconds)
        return _("%d s") % seconds if seconds < 60 else minutes_text(seconds // 60)


@dataclass(frozen=True)
class Row:
    """The queue, or a node, with what happened there."""

    title: str
    bars: list[Bar]


def timeline(job: Job, session: Session | None = None) -> list[Row]:
    """The rows of the picture; none before Slurm has told when the job was submitted."""
    now = timezone.now()
    begin = job.submitted
    if begin is None:
        return []
    end = max(job.ended or now, begin + timedelta(seconds=1))
    whole = (end - begin).total_seconds()

    def bar(kind: str, label: str, first: datetime, last: datetime) -> Bar:
        x = int((first - begin).total_seconds() / whole * WIDTH)
        width = max(NARROWEST, int((last - first).total_seconds() / whole * WIDTH))
        return Bar(kind, label, first, last, min(x, WIDTH - NARROWEST), width)

    started = job.started
    rows = [Row(_("Queue"), [bar("queued", _("Queued"), begin, min(started or end, end))])]
    if started is None:
        return rows
    ready = min(max(_ready(session) or started, started), end)
    bars = [bar("running", _("Running"), ready, end)]
    if ready > started:
        bars.insert(0, bar("staging", _("Staging and start"), started, ready))
    nodes = expand(job.node_list) if job.node_list else []
    rows += [Row(name, bars) for name in nodes[:MOST_NODES]]
    if len(nodes) > MOST_NODES:
        rows.append(Row(_("%d more nodes") % (len(nodes) - MOST_NODES), bars))
    return rows


def _ready(session: Session | None) -> datetime | None:
    """When the session's server could be reached; batch jobs do not report it."""
    reported = session.last_reported if session is not None else None
    marks = {mark.step: mark.at for mark in reported.marks} if reported is not None else {}
    return marks.get(Step.ROUTED) or marks.get(Step.LISTENING)
