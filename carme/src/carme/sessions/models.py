"""What is known about one session, as the broker publishes it."""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from carme.sessions.states import ENDINGS, STATES, Ending, SessionState, Step
from carme.translation.models import Sentence, WithMessages

__all__ = ["Extension", "Mark", "QueueEstimate", "ServerStatus", "Session", "SessionNote"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Mark(_Frozen):
    """When a session reached a step of its start."""

    step: Step
    at: AwareDatetime


class ServerStatus(StrEnum):
    """What the hub knows about a session's server."""

    STARTING = "starting"
    READY = "ready"
    UNREACHABLE = "unreachable"
    STOPPING = "stopping"
    GONE = "gone"


class SessionNote(WithMessages, _Frozen):
    """What the hub reports to the broker about a session; what is None or empty changes nothing.

    Attributes:
        server: Where the server stands.
        marks: Steps reached; the first time of a step holds.
        ending: Why the hub is about to end it, set before it cancels the job: `stopped` or `idle`.
        message: What the hub itself has to say about a failure, one sentence.
        idle_since: Since when neither kernels, GPUs nor ranks have been busy; the epoch means "busy".
        stops_idle: When it will be stopped for being idle, once its owner was warned; the epoch means "not".
    """

    server: ServerStatus | None = None
    marks: tuple[Mark, ...] = Field(default=(), max_length=len(Step))
    ending: Ending | None = None
    message: Annotated[Sentence, Field(max_length=2000)] = ""
    idle_since: AwareDatetime | None = None
    stops_idle: AwareDatetime | None = None


class QueueEstimate(WithMessages):
    """When a waiting job may start.

    Attributes:
        place: Its place among the jobs that wait for the same partition, 1 is next.
        waiting: How many wait there.
        reason: Slurm's reason in plain words.
        earliest, latest: The range of the expected start; None when Slurm has no plan for it yet.
        correct, judged: Of the last `judged` such ranges, `correct` held the true start.
    """

    model_config = ConfigDict(frozen=True)

    place: int
    waiting: int
    reason: Sentence
    earliest: datetime | None = None
    latest: datetime | None = None
    correct: int = 0
    judged: int = 0


class Extension(_Frozen):
    """What an extension did: the new end and limit (minutes since the start)."""

    ends: datetime
    minutes_limit: int


class Session(WithMessages):
    """One session.

    Attributes:
        name: The name of its server in the hub (`s` and 8 characters from the portal).
        job_id: Its Slurm job.
        lost_jobs: Earlier jobs of it that Slurm lost before they began; it was submitted again.
        sentence: What holds it up, how it ended, or why it is lost: one sentence with the next step. Empty
            when there is nothing to say.
        ending: Why it is over; None until then.
        log_pending: It failed, and the broker still reads the end of its log; then `sentence` has it.
        estimate: While it is queued.
        marks: The timeline, in order.
        ends: When its time limit ends it, once it runs.
        stops_idle: When it is stopped for being idle unless it is used; None if nothing threatens.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    owner: str
    job_id: int
    image: str | None
    state: SessionState
    sentence: Sentence = ""
    ending: Ending | None = None
    log_pending: bool = False
    estimate: QueueEstimate | None = None
    node_list: str = ""
    partition: str = ""
    marks: tuple[Mark, ...] = ()
    ends: datetime | None = None
    idle_since: datetime | None = None
    stops_idle: datetime | None = None
    lost_jobs: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Its state in users' words; an ended one says how."""
        return ENDINGS[self.ending][0] if self.ending else STATES[self.state]

    @property
    def is_over(self) -> bool:
        """It has ended."""
        return self.state is SessionState.ENDED

    @property
    def failed(self) -> bool:
        """It ended in a way that its owner did not want."""
        return self.ending is not None and ENDINGS[self.ending][1]

    def at(self, step: Step) -> datetime | None:
        """When it reached a step."""
        return next((mark.at for mark in self.marks if mark.step is step), None)

    def between(self, first: Step, last: Step) -> timedelta | None:
        """The time from one step to another, when both are known."""
        begin, end = self.at(first), self.at(last)
        return end - begin if begin and end else None
