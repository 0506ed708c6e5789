"""A job's life as bars over time: queued, staging, running, on each of its nodes."""

from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.jobs.nodes import expand
from carme.sessions import Step
from carme_webui.jobs.models import Job
from carme_webui.jobs.spans import Row, Span, Spans
from carme_webui.sessions.models import Session

__all__ = ["timeline"]

MOST_NODES = 16


def timeline(job: Job, session: Session | None = None) -> Spans | None:
    """The bars; None before Slurm has reported when the job was submitted."""
    begin = job.submitted
    if begin is None:
        return None
    end = max(job.ended or timezone.now(), begin + timedelta(seconds=1))
    started, goes_on = job.started, job.is_unfinished
    queued = Span("queued", _("Queued"), begin, min(started or end, end), goes_on and started is None)
    rows = [Row(_("Queue"), [queued])]
    if started is not None:
        ready = min(max(_ready(session) or started, started), end)
        spans = [Span("running", _("Running"), ready, end, goes_on)]
        if ready > started:
            spans.insert(0, Span("staging", _("Staging and start"), started, ready))
        nodes = expand(job.node_list) if job.node_list else []
        rows += [Row(name, spans) for name in nodes[:MOST_NODES]]
        if len(nodes) > MOST_NODES:
            rows.append(Row(_("%d more nodes") % (len(nodes) - MOST_NODES), spans))
    return Spans(_("Timeline"), rows)


def _ready(session: Session | None) -> datetime | None:
    """When the session's server could be reached; batch jobs do not report it."""
    reported = session.last_reported if session is not None else None
    marks = {mark.step: mark.at for mark in reported.marks} if reported is not None else {}
    return marks.get(Step.ROUTED) or marks.get(Step.LISTENING)
