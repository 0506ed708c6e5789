"""How much of the GPUs is booked on each day that the calendar shows."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.utils.formats import date_format
from django.utils.translation import gettext as _

from carme.bookings import BookingState
from carme.bookings.agreement import is_ours
from carme.config import BookingSettings
from carme.jobs import Reservation
from carme_webui.accounts.models import User
from carme_webui.bookings.lanes import Day
from carme_webui.bookings.models import Booking
from carme_webui.metrics.charts import PERCENT, Part, Stack

__all__ = ["share_of"]

HOUR = timedelta(hours=1)


def share_of(
    user: User,
    days: Sequence[Day],
    names: Sequence[str],
    gpus: int,
    reservations: Iterable[Reservation],
    policy: BookingSettings,
) -> Stack | None:
    """The share of the GPUs of these nodes that is booked on each day, and by whom.

    Args:
        days: Those of the calendar; bookings that are over are not in it, and not here.
        names: The nodes of a kind.
        gpus: Of each of them.
        policy: Says how much may be booked at any moment.

    Returns:
        None if there are no such nodes.
    """
    if not names or not gpus:
        return None
    kinds = {
        "mine": _("mine"),
        "shared": _("shared with me"),
        "other": _("others"),
        "asked": _("waits for approval"),
        "blocked": _("maintenance"),
    }
    bounds = [(day.slots[0].start, day.slots[-1].end) for day in days]
    hours = {kind: [0.0] * len(bounds) for kind in kinds}
    for kind, start, end, count in _taken(user, bounds, frozenset(names), gpus, reservations):
        for place, (first, last) in enumerate(bounds):
            hours[kind][place] += count * max(0.0, (min(end, last) - max(start, first)) / HOUR)
    wholes = [len(names) * gpus * ((last - first) / HOUR) for first, last in bounds]
    parts = [
        Part(title, [_percent(value, whole) for value, whole in zip(hours[kind], wholes, strict=True)])
        for kind, title in kinds.items()
        if any(hours[kind]) or kind == "mine"
    ]
    labels = [date_format(day.date, _("D j")) for day in days]
    most = policy.share_percent
    limit = float(most) if most < PERCENT else None
    return Stack(_("Booked GPUs"), "%", _("Day"), labels, parts, PERCENT, limit, _("may be booked at once"))


def _percent(value: float, whole: float) -> float:
    return round(min(1.0, value / whole) * PERCENT, 1)


def _taken(
    user: User,
    bounds: Sequence[tuple[datetime, datetime]],
    names: frozenset[str],
    gpus: int,
    reservations: Iterable[Reservation],
) -> Iterable[tuple[str, datetime, datetime, int]]:
    """Kind, start, end and GPUs of each booking and each maintenance on these nodes."""
    for row in Booking.open().filter(start__lt=bounds[-1][1], end__gt=bounds[0][0]):
        kind = "mine" if row.owner_id == user.pk else "shared" if row.may_be_used_by(user) else "other"
        kind = "asked" if row.state == BookingState.REQUESTED else kind
        if count := len(names.intersection(row.node_names)) * row.gpus_per_node:
            yield kind, row.start, row.end, count
    for one in reservations:
        if not is_ours(one.name) and (count := len(names.intersection(one.node_names)) * gpus):
            yield "blocked", one.start, one.end, count
