"""How much of the GPUs is booked on each day that the calendar shows."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from carme.bookings import BookingState, Cause
from carme.bookings.reconcile import is_ours
from carme.config import BookingSettings
from carme.jobs import Reservation
from carme_webui.accounts.models import User
from carme_webui.bookings.lanes import Day
from carme_webui.bookings.models import Booking
from carme_webui.metrics.charts import PERCENT, Part, Stack

__all__ = ["share_of"]

HOUR = timedelta(hours=1)
#: Why requests ended that nobody approved: they had no nodes.
NEVER_BOOKED = (Cause.DENIED, Cause.UNANSWERED)

#: From when to when.
_Span = tuple[datetime, datetime]


def share_of(
    user: User,
    days: Sequence[Day],
    names: Sequence[str],
    gpus: int,
    reservations: Iterable[Reservation],
    policy: BookingSettings | None,
) -> Stack | None:
    """The share of the GPUs of these nodes that is or was booked on each day, and by whom.

    Args:
        days: Those of the calendar.
        names: The nodes of a kind.
        gpus: Of each of them.
        policy: Says how much may be booked at any moment; None: that is of other nodes as well.

    Returns:
        None if there are no such nodes.
    """
    if not names or not gpus:
        return None
    kinds = {
        "mine": _("mine"),
        "shared": _("shared with me"),
        "other": _("others"),
        "requested": _("waits for approval"),
        "blocked": _("maintenance"),
    }
    bounds = [(day.slots[0].start, day.slots[-1].end) for day in days]
    hours = {kind: [0.0] * len(bounds) for kind in kinds}
    for kind, start, end, count in _taken(user, bounds, names, gpus, reservations):
        for place, (first, last) in enumerate(bounds):
            hours[kind][place] += count * max(0.0, (min(end, last) - max(start, first)) / HOUR)
    wholes = [len(names) * gpus * ((last - first) / HOUR) for first, last in bounds]
    parts = [
        Part(title, [_percent(value, whole) for value, whole in zip(hours[kind], wholes, strict=True)])
        for kind, title in kinds.items()
        if any(hours[kind]) or kind == "mine"
    ]
    labels = [date_format(day.date, _("D j")) for day in days]
    limit = float(policy.share_percent) if policy and policy.share_percent < PERCENT else None
    begun = [place for place, (first, _last) in enumerate(bounds) if first <= timezone.now()]
    return Stack(
        _("Booked GPUs"), "%", _("Day"), labels, parts, PERCENT, limit, _("may be booked at once"),
        current=begun[-1] if begun else 0,
    )  # fmt: skip


def _percent(value: float, whole: float) -> float:
    return round(min(1.0, value / whole) * PERCENT, 1)


def _taken(
    user: User,
    bounds: Sequence[_Span],
    names: Sequence[str],
    gpus: int,
    reservations: Iterable[Reservation],
) -> Iterator[tuple[str, datetime, datetime, int]]:
    """Kind, start, end and GPUs of all that these nodes are kept for, no hour of a node twice."""
    free: dict[str, list[_Span]] = {name: [(bounds[0][0], bounds[-1][1])] for name in names}
    for kind, start, end, nodes, count in _claims(user, bounds, gpus, reservations):
        for name in free.keys() & set(nodes):
            inside, free[name] = _cut(free[name], start, end)
            for first, last in inside:
                yield kind, first, last, count


def _cut(spans: Sequence[_Span], start: datetime, end: datetime) -> tuple[list[_Span], list[_Span]]:
    """What of these spans lies between start and end, and what does not."""
    if end <= start:
        return [], list(spans)
    inside = [(max(first, start), min(last, end)) for first, last in spans]
    outside = [part for first, last in spans for part in ((first, min(last, start)), (max(first, end), last))]
    return [each for each in inside if each[0] < each[1]], [each for each in outside if each[0] < each[1]]


def _claims(
    user: User, bounds: Sequence[_Span], gpus: int, reservations: Iterable[Reservation]
) -> Iterator[tuple[str, datetime, datetime, Sequence[str], int]]:
    """Kind, start, end, nodes and GPUs of each; maintenance first, as nobody has a node meanwhile."""
    for reservation in reservations:
        if not is_ours(reservation.name):
            yield "blocked", reservation.start, reservation.end, reservation.node_names, gpus
    # Bookings that are over count up to when they really were.
    for row in Booking.objects.filter(start__lt=bounds[-1][1], end__gt=bounds[0][0]):
        kind = "mine" if row.owner_id == user.pk else "shared" if row.may_be_used_by(user) else "other"
        kind = "requested" if row.state == BookingState.REQUESTED else kind
        if row.cause not in NEVER_BOOKED:
            end = min(row.end, row.ended) if row.ended else row.end
            yield kind, row.start, end, row.node_names, min(row.gpus_per_node, gpus)
