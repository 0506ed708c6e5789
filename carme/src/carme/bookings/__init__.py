"""Bookings: nodes with GPUs that users keep for themselves for a time, as Slurm reservations."""

from carme.bookings.models import (
    MAINTENANCE_PATTERN,
    NAME_PATTERN,
    YEARS,
    BookingRequest,
    ReservationSpec,
    Window,
)
from carme.bookings.policy import Standing, board_of, check_rules, choose_nodes, needs_approval
from carme.bookings.slots import Board, Claim, Need
from carme.bookings.states import CAUSES, STATES, TRANSITIONS, BookingState, Cause, may_follow

__all__ = [
    "CAUSES",
    "MAINTENANCE_PATTERN",
    "NAME_PATTERN",
    "STATES",
    "TRANSITIONS",
    "YEARS",
    "Board",
    "BookingRequest",
    "BookingState",
    "Cause",
    "Claim",
    "Need",
    "ReservationSpec",
    "Standing",
    "Window",
    "board_of",
    "check_rules",
    "choose_nodes",
    "may_follow",
    "needs_approval",
]
