"""What a session is: its states, how it can end, and what is known about it while it lives."""

from carme.sessions.models import Extension, Mark, QueueEstimate, ServerStatus, Session, SessionNote
from carme.sessions.states import (
    ENDINGS,
    STATES,
    STEPS,
    TRANSITIONS,
    Ending,
    SessionState,
    Step,
    may_follow,
)
from carme.sessions.warnings import level_of, warned_at

__all__ = [
    "ENDINGS",
    "STATES",
    "STEPS",
    "TRANSITIONS",
    "Ending",
    "Extension",
    "Mark",
    "QueueEstimate",
    "ServerStatus",
    "Session",
    "SessionNote",
    "SessionState",
    "Step",
    "level_of",
    "may_follow",
    "warned_at",
]
