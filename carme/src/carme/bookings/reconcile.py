"""Reconcile Slurm's reservations with the bookings: what to change. Pure functions.

The bookings are the desired state, the reservations with names of ours the actual one. Each call compares
both anew, so it does not matter whether the portal, the broker or Slurm was away, nor for how long.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from carme.bookings.models import MAINTENANCE_PATTERN, NAME_PATTERN, ReservationSpec, Window
from carme.jobs import Reservation

__all__ = ["Plan", "differs", "is_maintenance", "is_ours", "plan", "shifted"]


@dataclass(frozen=True)
class Plan:
    """The changes that make Slurm's reservations fit the bookings.

    Attributes:
        keep: Reservations to make or to change; first those that are there, as they may make room.
        release: Names of reservations that nobody has a booking for.
    """

    keep: list[ReservationSpec]
    release: list[str]


def plan(specs: Iterable[ReservationSpec], reservations: Iterable[Reservation], now: datetime) -> Plan:
    """Compare what is to be with what is.

    Args:
        specs: Those of all bookings that are approved and not over.
        reservations: All of Slurm's; those whose names are not ours are left alone.
    """
    wanted = {spec.name: spec for spec in specs if spec.end > now}
    there = {reservation.name: reservation for reservation in reservations if is_ours(reservation.name)}
    changed = [
        spec for spec in wanted.values() if spec.name not in there or differs(spec, there[spec.name], now)
    ]
    changed.sort(key=lambda spec: (spec.name not in there, spec.start, spec.name))
    return Plan(keep=changed, release=sorted(there.keys() - wanted.keys()))


def is_ours(name: str) -> bool:
    """Whether a reservation is Carme's to change."""
    return re.fullmatch(NAME_PATTERN, name) is not None


def is_maintenance(name: str) -> bool:
    """Whether a reservation is a maintenance that was planned with Carme."""
    return re.fullmatch(MAINTENANCE_PATTERN, name) is not None


def shifted(window: Window | ReservationSpec, reservation: Reservation, now: datetime) -> bool:
    """Whether a reservation has other nodes or another time; the start of one that has begun stays."""
    has_begun = reservation.start <= now
    return (
        (reservation.start != window.start and not has_begun)
        or reservation.end != window.end
        or set(reservation.node_names) != set(window.node_names)
    )


def differs(spec: ReservationSpec, reservation: Reservation, now: datetime) -> bool:
    """Whether a reservation is not what it is to be."""
    return shifted(spec, reservation, now) or (
        set(reservation.users) != set(spec.users) or set(reservation.accounts) != set(spec.accounts)
    )
