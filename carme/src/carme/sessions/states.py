"""The one state machine of a session; portal, hub, CLI and API show these words."""

from enum import StrEnum

from carme.translation import noop

__all__ = ["ENDINGS", "STATES", "STEPS", "TRANSITIONS", "Ending", "SessionState", "Step", "may_follow"]


class SessionState(StrEnum):
    """Where in its life a session is."""

    REQUESTED = "requested"
    QUEUED = "queued"
    STARTING = "starting"
    READY = "ready"
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    ENDED = "ended"
    LOST = "lost"


#: What users read for each state.
STATES: dict[SessionState, str] = {
    SessionState.REQUESTED: "Requested",
    SessionState.QUEUED: "Waiting in the queue",
    SessionState.STARTING: "Starting",
    SessionState.READY: "Ready",
    SessionState.SUSPENDED: "Suspended",
    SessionState.STOPPING: "Stopping",
    SessionState.ENDED: "Ended",
    SessionState.LOST: "Out of reach",
}

#: What can follow each state. A lost session is one whose job Slurm still counts as running although its node
#: or its server does not answer: it comes back, or it ends.
TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.REQUESTED: frozenset(
        {
            SessionState.QUEUED,
            SessionState.STARTING,
            SessionState.SUSPENDED,
            SessionState.STOPPING,
            SessionState.ENDED,
        }
    ),
    SessionState.QUEUED: frozenset(
        {
            SessionState.STARTING,
            SessionState.READY,
            SessionState.SUSPENDED,
            SessionState.STOPPING,
            SessionState.ENDED,
        }
    ),
    SessionState.STARTING: frozenset(
        {
            SessionState.QUEUED,  # Slurm puts a job back whose node failed before anything had run
            SessionState.READY,
            SessionState.SUSPENDED,
            SessionState.STOPPING,
            SessionState.ENDED,
            SessionState.LOST,
        }
    ),
    SessionState.READY: frozenset(
        {SessionState.SUSPENDED, SessionState.STOPPING, SessionState.ENDED, SessionState.LOST}
    ),
    SessionState.SUSPENDED: frozenset(
        {
            SessionState.STARTING,
            SessionState.READY,
            SessionState.STOPPING,
            SessionState.ENDED,
            SessionState.LOST,
        }
    ),
    SessionState.STOPPING: frozenset({SessionState.ENDED}),
    SessionState.ENDED: frozenset(),
    SessionState.LOST: frozenset(
        {
            SessionState.STARTING,
            SessionState.READY,
            SessionState.SUSPENDED,
            SessionState.STOPPING,
            SessionState.ENDED,
        }
    ),
}


def may_follow(state: SessionState, following: SessionState) -> bool:
    """Whether a session in `state` may go to `following`."""
    return following in TRANSITIONS[state]


class Ending(StrEnum):
    """Why a session is over."""

    STOPPED = "stopped"
    FINISHED = "finished"
    IDLE = "idle"
    TIME_LIMIT = "time_limit"
    REFUSED = "refused"
    IMAGE_MISSING = "image_missing"
    HOME_NOT_WRITABLE = "home_not_writable"
    DIED_AT_START = "died_at_start"
    DIED = "died"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    PREEMPTED = "preempted"
    CANCELLED_BY_ADMIN = "cancelled_by_admin"
    LOST = "lost"


#: What users read for each ending, and whether it is a failure.
ENDINGS: dict[Ending, tuple[str, bool]] = {
    Ending.STOPPED: (noop("Stopped"), False),
    Ending.FINISHED: (noop("Finished"), False),
    Ending.IDLE: (noop("Ended because it was idle"), False),
    Ending.TIME_LIMIT: (noop("Time limit reached"), False),
    Ending.REFUSED: (noop("Refused"), True),
    Ending.IMAGE_MISSING: (noop("Image missing"), True),
    Ending.HOME_NOT_WRITABLE: (noop("Home not writable"), True),
    Ending.DIED_AT_START: (noop("Failed to start"), True),
    Ending.DIED: (noop("Failed"), True),
    Ending.OUT_OF_MEMORY: (noop("Out of memory"), True),
    Ending.NODE_FAILURE: (noop("Node failed"), True),
    Ending.PREEMPTED: (noop("Preempted"), True),
    Ending.CANCELLED_BY_ADMIN: (noop("Cancelled by an administrator"), True),
    Ending.LOST: (noop("Lost"), True),
}


class Step(StrEnum):
    """A point of the path from Start to the first page, in its order."""

    REQUESTED = "requested"  # the portal took the request
    SUBMITTED = "submitted"  # Slurm took the job
    ALLOCATED = "allocated"  # Slurm gave it nodes
    PROLOG = "prolog"  # the nodes were prepared; the job's own script begins
    CONTAINER = "container"  # the first program runs inside the container
    LISTENING = "listening"  # the server listens
    ROUTED = "routed"  # the hub's proxy leads to it
    FIRST_PAGE = "first_page"  # a browser got its first page


#: What users read for each step.
STEPS: dict[Step, str] = {
    Step.REQUESTED: "Requested",
    Step.SUBMITTED: "Submitted to Slurm",
    Step.ALLOCATED: "Nodes allocated",
    Step.PROLOG: "Nodes prepared",
    Step.CONTAINER: "Container started",
    Step.LISTENING: "Server listening",
    Step.ROUTED: "Ready to open",
    Step.FIRST_PAGE: "First opened",
}
