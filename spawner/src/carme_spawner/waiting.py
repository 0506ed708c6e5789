"""How long a session waits: in Slurm's queue, and from the beginning of its job until its server reports."""

from datetime import UTC, datetime, timedelta

from carme.config import Settings
from carme.errors import CarmeError
from carme.jobs import Job, SessionOptions
from carme.translation import message as _

__all__ = [
    "LONGEST_START",
    "LONGEST_WAIT",
    "PUT_BACK",
    "START_MARGIN",
    "given_up",
    "is_too_long",
    "longest_start",
    "start_timeout",
]

#: The time in which a server has reported once its job runs and its data is there, unless something is wrong.
LONGEST_START = timedelta(minutes=3)
#: Longest wait in the queue.
LONGEST_WAIT = timedelta(days=7)
#: What JupyterHub waits beyond that and a job's start: sessions are ended here, with a reason.
START_MARGIN = timedelta(days=1)
#: Why a session ended whose job Slurm put back into the queue.
PUT_BACK = _(
    "Slurm was restarted just after the session had started, and put it back into the queue without its "
    "server; start it again."
)


def longest_start(options: SessionOptions, settings: Settings) -> timedelta:
    """The time from the beginning of a session's job in which its server has reported."""
    if not options.stage:
        return LONGEST_START
    # The job itself copies what its node does not have.
    return LONGEST_START + timedelta(minutes=settings.staging.minutes)


def start_timeout(settings: Settings) -> timedelta:
    """How long JupyterHub waits for a start: a job that has begun at the last moment copies its data."""
    return LONGEST_WAIT + LONGEST_START + timedelta(minutes=settings.staging.minutes) + START_MARGIN


def is_too_long(job: Job) -> bool:
    """Whether a job has waited in the queue for so long that it is given up."""
    return job.is_pending and job.submitted is not None and datetime.now(UTC) - job.submitted > LONGEST_WAIT


def given_up() -> CarmeError:
    """Why a job that has waited for too long is taken out of the queue."""
    return CarmeError(
        _("The session waited in the queue for {days} days and was given up.", days=LONGEST_WAIT.days),
        _("Request fewer GPUs or another partition, or book the time that you need."),
        code="session-ended",
    )
