"""The one state machine of a booking; portal, reconciler and calendar show these words."""

from enum import StrEnum

__all__ = ["CAUSES", "STATES", "TRANSITIONS", "BookingState", "Cause", "may_follow"]


class BookingState(StrEnum):
    """Where in its life a booking is."""

    REQUESTED = "requested"
    APPROVED = "approved"
    ACTIVE = "active"
    ENDED = "ended"


#: What users read for each state.
STATES: dict[BookingState, str] = {
    BookingState.REQUESTED: "Waits for approval",
    BookingState.APPROVED: "Booked",
    BookingState.ACTIVE: "Running now",
    BookingState.ENDED: "Over",
}


class Cause(StrEnum):
    """Why a booking is over."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    DENIED = "denied"
    UNANSWERED = "unanswered"
    UNUSED = "unused"
    IMPOSSIBLE = "impossible"


#: What users read for each cause.
CAUSES: dict[Cause, str] = {
    Cause.FINISHED: "Its time is over",
    Cause.CANCELLED: "Deleted",
    Cause.DENIED: "Refused by a manager",
    Cause.UNANSWERED: "Nobody approved it in time",
    Cause.UNUSED: "Given back, because nothing ran in it",
    Cause.IMPOSSIBLE: "Slurm could not keep its GPUs",
}

#: What can follow each state, and with which causes it can end there.
TRANSITIONS: dict[BookingState, frozenset[BookingState | Cause]] = {
    BookingState.REQUESTED: frozenset(
        {BookingState.APPROVED, Cause.CANCELLED, Cause.DENIED, Cause.UNANSWERED, Cause.IMPOSSIBLE}
    ),
    BookingState.APPROVED: frozenset(
        {
            BookingState.REQUESTED,  # changed so that it needs an approval again
            BookingState.ACTIVE,
            Cause.FINISHED,  # its whole time went by during an outage
            Cause.CANCELLED,
            Cause.IMPOSSIBLE,
        }
    ),
    BookingState.ACTIVE: frozenset({Cause.FINISHED, Cause.CANCELLED, Cause.UNUSED, Cause.IMPOSSIBLE}),
    BookingState.ENDED: frozenset(),
}


def may_follow(state: BookingState, following: BookingState | Cause) -> bool:
    """Whether a booking in `state` may go to another state, or end for this cause."""
    return following in TRANSITIONS[state]
