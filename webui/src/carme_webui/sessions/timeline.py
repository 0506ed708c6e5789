"""What happened to a session, step by step."""

from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _

from carme.sessions import STEPS, Step
from carme_webui.jobs.models import Job
from carme_webui.sessions.models import Session

__all__ = ["Line", "timeline"]


@dataclass(frozen=True)
class Line:
    """One step.

    Attributes:
        label: What was reached.
        at: When.
        took: Seconds since the step before; None for the first one.
    """

    label: str
    at: datetime
    took: float | None = None


def timeline(session: Session, job: Job | None) -> list[Line]:
    """The steps that a session has reached, in order, and how long each took."""
    reported = session.last_reported
    times: dict[str, datetime] = {_(STEPS[Step.REQUESTED]): session.created}
    for mark in reported.marks if reported is not None else ():
        if mark.step is not Step.REQUESTED:
            times[_(STEPS[mark.step])] = mark.at
    if session.is_over:
        times[_("Ended")] = job.ended if job is not None and job.ended else session.changed
    lines: list[Line] = []
    for label, at in times.items():
        # Clocks of hosts differ a little, and Slurm's own times are whole seconds.
        took = max(0.0, (at - lines[-1].at).total_seconds()) if lines else None
        lines.append(Line(label, at, took))
    return lines
