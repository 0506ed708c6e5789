"""The calendar's lanes: what each node is to whom, in columns of equal length. Pure functions."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from itertools import groupby
from zoneinfo import ZoneInfo

from carme.bookings.clock import day_bounds

__all__ = ["Cell", "Day", "Item", "Lane", "Slot", "lay_out", "slots_of"]


@dataclass(frozen=True)
class Slot:
    """One column."""

    start: datetime
    end: datetime


@dataclass(frozen=True)
class Day:
    """A day of the site's clocks and its columns: more or fewer when clocks change."""

    date: date
    slots: Sequence[Slot]


@dataclass(frozen=True)
class Item:
    """Something that a node is kept for.

    Attributes:
        kind: `mine`, `shared`, `other`, `asked`, `blocked` or `job`.
        label: What it is called.
        words: From when to when.
        url: Its page, if the reader may see it.
    """

    node: str
    start: datetime
    end: datetime | None
    kind: str
    label: str
    words: str = ""
    url: str = ""


@dataclass(frozen=True)
class Cell:
    """Columns next to each other that show the same.

    Attributes:
        items: What the node is kept for; empty: it is free.
        free: The HTML of free columns, a cell for each of them.
    """

    start: datetime
    span: int
    items: tuple[Item, ...]
    free: str = ""


@dataclass(frozen=True)
class Lane:
    """A node."""

    node: str
    available: bool
    cells: list[Cell]


def slots_of(first: date, days: int, length: timedelta, zone: ZoneInfo) -> list[Day]:
    """The columns of so many days; the last one of a day may be shorter."""
    found = []
    for number in range(days):
        day = first + timedelta(days=number)
        start, end = day_bounds(day, zone)
        count = -(-(end - start) // length)
        slots = [
            Slot(start + place * length, min(start + (place + 1) * length, end)) for place in range(count)
        ]
        found.append(Day(day, slots))
    return found


def lay_out(
    nodes: Iterable[tuple[str, bool]],
    items: Iterable[Item],
    days: Sequence[Day],
    free: Callable[[str, bool, Sequence[Slot]], str],
) -> list[Lane]:
    """One lane for each node.

    Args:
        nodes: Names, and whether they take jobs.
        free: Makes the cells of free columns next to each other, of a node that takes jobs or does not; it is
            not called for each column by itself, as a calendar has thousands of them.
    """
    slots = [slot for day in days for slot in day.slots]
    by_node: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: item.start):
        by_node.setdefault(item.node, []).append(item)
    return [
        Lane(node, available, _cells(slots, by_node.get(node, []), partial(free, node, available)))
        for node, available in nodes
    ]


def _cells(slots: Sequence[Slot], items: list[Item], free: Callable[[Sequence[Slot]], str]) -> list[Cell]:
    shown: list[tuple[Item, ...]] = [()] * len(slots)
    starts, ends = [slot.start for slot in slots], [slot.end for slot in slots]
    for item in items:
        last = len(slots) if item.end is None else bisect_left(starts, item.end)
        for place in range(bisect_right(ends, item.start), last):
            shown[place] += (item,)
    cells: list[Cell] = []
    for what, group in groupby(range(len(slots)), key=shown.__getitem__):
        members = [slots[place] for place in group]
        cells.append(Cell(members[0].start, len(members), what, "" if what else free(members)))
    return cells
