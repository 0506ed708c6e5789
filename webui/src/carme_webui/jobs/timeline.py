"""A job's life as bars over time: queued, staging, running, on each of its nodes."""

from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.jobs.nodes import expand
from carme.sessions import Step
from carme_webui.jobs.bars import NARROWEST, WIDTH, Bar, Row
from carme_webui.jobs.models import Job
from carme_webui.sessions.models import Session

__all__ = ["timeline"]

MOST_NODES = 16


def timeline(job: Job, session: Session | None = None) -> list[Row]:
    """The rows of the picture; none before Slurm has reported when the job was submitted."""
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
