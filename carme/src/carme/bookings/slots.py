"""Which nodes can be booked, and when the nearest time is. Pure functions.

Nodes are booked whole. A claim holds from its start up to, but without, its end; so one may begin at the
moment at which another ends.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

__all__ = ["Board", "Claim", "Need"]

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Claim:
    """Somebody has a node, or a part of it.

    Attributes:
        end: None for what lasts.
        booked: How many GPUs of it count against the share of the system that may be booked.
    """

    node: str
    start: datetime
    end: datetime | None
    booked: int = 0


@dataclass(frozen=True)
class Need:
    """So many nodes with so many GPUs each, for so long; those `named` must be among them."""

    nodes: int
    gpus_per_node: int
    length: timedelta
    named: frozenset[str] = frozenset()


class _Profile:
    """How much is taken when.

    Args:
        amounts: Start, end and size of what is taken.
    """

    def __init__(self, amounts: Iterable[tuple[datetime, datetime, int]]) -> None:
        changes: dict[datetime, int] = {}
        for start, end, size in amounts:
            if end > start and size:
                changes[start] = changes.get(start, 0) + size
                changes[end] = changes.get(end, 0) - size
        self._times = sorted(changes)
        self._taken: list[int] = []
        taken = 0
        for moment in self._times:
            taken += changes[moment]
            self._taken.append(taken)

    def peak(self, start: datetime, end: datetime) -> int:
        """The most that is taken at any moment from `start` up to `end`."""
        first = bisect_right(self._times, start) - 1
        peak = self._taken[first] if first >= 0 else 0
        for place in range(first + 1, len(self._times)):
            if self._times[place] >= end:
                break
            peak = max(peak, self._taken[place])
        return peak


class Board:
    """The nodes of one kind in a partition, and who has them when.

    Args:
        nodes: Those that may be booked.
        claims: Who has which; those of other nodes count as far as they are `booked`.
        most_booked: How many GPUs may be booked at a time; None: all.
        own: What a project has booked; at most `own_most` GPUs at a time; None: any number.
    """

    def __init__(
        self,
        nodes: Iterable[str],
        claims: Iterable[Claim],
        most_booked: int | None = None,
        own: Iterable[Claim] = (),
        own_most: int | None = None,
    ) -> None:
        self.own_most = own_most
        self._own = _Profile((claim.start, claim.end or _NEVER, claim.booked) for claim in own)
        self.nodes = sorted(nodes)
        self.most_booked = most_booked
        spans: dict[str, list[tuple[datetime, datetime, int]]] = {node: [] for node in self.nodes}
        booked: list[tuple[datetime, datetime, int]] = []
        self._turns: set[datetime] = set()
        self._starts: set[datetime] = set()
        for claim in claims:
            end = claim.end or _NEVER
            if claim.node not in spans and not claim.booked:
                continue
            self._starts.add(claim.start)
            if claim.end is not None:
                self._turns.add(claim.end)
            booked.append((claim.start, end, claim.booked))
            if claim.node in spans:
                spans[claim.node].append((claim.start, end, 1))
        self._taken = {node: _Profile(taken) for node, taken in spans.items()}
        self._booked = _Profile(booked)

    def free(self, start: datetime, end: datetime) -> list[str]:
        """The nodes that nobody has at any moment from `start` up to `end`."""
        return [node for node in self.nodes if not self._taken[node].peak(start, end)]

    def bookable(self, start: datetime, end: datetime) -> int | None:
        """How many more GPUs may be booked, whether or not they are free; None: any number."""
        left = [
            max(0, most - taken.peak(start, end))
            for most, taken in ((self.most_booked, self._booked), (self.own_most, self._own))
            if most is not None
        ]
        return min(left, default=None)

    def is_own_limit(self, start: datetime, end: datetime, gpus: int) -> bool:
        """Whether it is the project's own share that so many more GPUs would exceed."""
        return self.own_most is not None and gpus > self.own_most - self._own.peak(start, end)

    def place(self, need: Need, start: datetime, prefer: Iterable[str] = ()) -> list[str] | None:
        """The nodes that it gets when it starts then; None when it cannot.

        Args:
            prefer: Nodes to take first where they are free: those of the booking that is changed.
        """
        end = start + need.length
        bookable = self.bookable(start, end)
        if bookable is not None and need.nodes * need.gpus_per_node > bookable:
            return None
        first = set(prefer)
        free = self.free(start, end)
        if not need.named.issubset(free):
            return None
        free.sort(key=lambda node: (node not in need.named, node not in first))
        return sorted(free[: need.nodes]) if len(free) >= need.nodes else None

    def nearest(
        self, need: Need, around: datetime, earliest: datetime, latest: datetime, step: timedelta
    ) -> list[datetime]:
        """The starts nearest to one that was requested: at most one before it and two from it on, in order.

        Args:
            earliest, latest: Starts that are allowed.
            step: All starts are whole multiples of this, counted from a midnight in UTC.
        """
        # What can be had begins where a claim ends, and ceases where ours would run into the next one.
        after = {_round_up(turn, step) for turn in (*self._turns, earliest, around)}
        before = {_down(turn, step) for turn in (*(start - need.length for start in self._starts), latest)}
        before.add(_round_up(around, step) - step)
        earlier = sorted(
            (each for each in before if earliest <= each <= latest and each < around), reverse=True
        )
        later = sorted(each for each in after if earliest <= each <= latest and each >= around)
        return [*self._first_starts(need, earlier, 1), *self._first_starts(need, later, 2)]

    def _first_starts(self, need: Need, places: list[datetime], most: int) -> list[datetime]:
        found: list[datetime] = []
        for place in places:
            if len(found) == most:
                break
            if self.place(need, place) is not None:
                found.append(place)
        return found


def _down(moment: datetime, step: timedelta) -> datetime:
    return moment - (moment - _EPOCH) % step


def _round_up(moment: datetime, step: timedelta) -> datetime:
    return moment + (_EPOCH - moment) % step
