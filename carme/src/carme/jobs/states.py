"""The states of a job, as one table."""

from enum import Enum, StrEnum
from functools import cached_property
from typing import Literal, Self

#: Who cancelled a job: its owner, somebody else, Slurm itself because it could not launch it, or `root`:
#: that is an administrator or Slurm itself, and the accounting does not report which.
Canceller = Literal["owner", "other", "root", "slurm"]


class Phase(Enum):
    """Where in its life a job is."""

    PENDING = "pending"  # waits, holds nothing
    RUNNING = "running"  # its processes run
    ENDING = "ending"  # its processes have ended or are being ended; its nodes are not free yet
    OVER = "over"


class JobState(StrEnum):
    """Slurm's word for the state of a job."""

    PENDING = "PENDING"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    REQUEUE_FED = "REQUEUE_FED"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    STAGE_OUT = "STAGE_OUT"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The state in Slurm's output, e.g. `CANCELLED by 1000`; a word not known here is UNKNOWN."""
        words = text.split()
        word = words[0].rstrip("+") if words else ""
        return cls(word) if word in cls.__members__ else cls("UNKNOWN")

    @cached_property  # read for every job at every poll of the queue
    def phase(self) -> Phase:
        return PHASES[self]


PHASES: dict[JobState, Phase] = {
    JobState.PENDING: Phase.PENDING,
    JobState.REQUEUED: Phase.PENDING,
    JobState.REQUEUE_HOLD: Phase.PENDING,
    JobState.REQUEUE_FED: Phase.PENDING,
    JobState.RESV_DEL_HOLD: Phase.PENDING,
    JobState.SPECIAL_EXIT: Phase.PENDING,
    JobState.CONFIGURING: Phase.PENDING,
    JobState.RUNNING: Phase.RUNNING,
    JobState.RESIZING: Phase.RUNNING,
    JobState.SIGNALING: Phase.RUNNING,
    JobState.STOPPED: Phase.RUNNING,
    JobState.SUSPENDED: Phase.RUNNING,
    JobState.STAGE_OUT: Phase.ENDING,
    JobState.COMPLETING: Phase.ENDING,
    JobState.COMPLETED: Phase.OVER,
    JobState.CANCELLED: Phase.OVER,
    JobState.FAILED: Phase.OVER,
    JobState.TIMEOUT: Phase.OVER,
    JobState.DEADLINE: Phase.OVER,
    JobState.NODE_FAIL: Phase.OVER,
    JobState.BOOT_FAIL: Phase.OVER,
    JobState.LAUNCH_FAILED: Phase.OVER,
    JobState.OUT_OF_MEMORY: Phase.OVER,
    JobState.PREEMPTED: Phase.OVER,
    JobState.REVOKED: Phase.OVER,
    JobState.UNKNOWN: Phase.ENDING,  # neither serves anybody nor may be forgotten
}

# Where a job may go from each phase. Our own jobs are never requeued; other people's may be.
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.RUNNING, Phase.ENDING, Phase.OVER}),
    Phase.RUNNING: frozenset({Phase.ENDING, Phase.OVER, Phase.PENDING}),
    Phase.ENDING: frozenset({Phase.OVER, Phase.PENDING, Phase.RUNNING}),
    Phase.OVER: frozenset({Phase.PENDING}),
}
