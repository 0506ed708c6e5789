"""What events are, by the numbers of the core's recorder (native/src/recorder.hpp)."""

from enum import IntEnum


class Kind(IntEnum):
    """The kind of an event."""

    WAITING = 1
    LOADING = 2
    PIPELINE = 3
    PHASE = 4
    FIRING = 5
    TRANSFER = 6
    COLLECTIVE = 16
    SEND = 17
    RECEIVE = 18
    PUT = 32
    GET = 33
    ATOMIC = 34
    NOTIFY = 35
    NOTIFIED = 36
    FLUSH = 37


CATEGORIES = {
    Kind.WAITING: "waiting",
    Kind.LOADING: "loader",
    Kind.PIPELINE: "pipeline",
    Kind.PHASE: "phase",
    Kind.FIRING: "firing",
    Kind.TRANSFER: "transfer",
    Kind.COLLECTIVE: "collective",
    Kind.SEND: "message",
    Kind.RECEIVE: "message",
} | dict.fromkeys((Kind.PUT, Kind.GET, Kind.ATOMIC, Kind.NOTIFY, Kind.NOTIFIED, Kind.FLUSH), "one-sided")
"""Of each kind, as profiles and pages name it."""

KINDS: dict[str, Kind] = {CATEGORIES[kind]: kind for kind in list(Kind)[:7]}
"""The kinds that Python records, by category."""


def title(kind: int, name: str, stage: int, micro_batch: int) -> str:
    """What an event is called where there is room for a line."""
    if kind == Kind.PIPELINE:
        return f"stage {stage}, {name} of micro-batch {micro_batch}"
    if kind == Kind.FIRING and micro_batch:
        return f"{name} of micro-batch {micro_batch - 1}"
    return f"wait: {name}" if kind == Kind.WAITING else name
