"""The calendar's lanes: what each node is to whom, in columns of equal length. Pure functions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
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
    """Columns next to each other that show the same; no items: the node is free.

    Attributes:
        link: What a free column shows, as HTML; empty where its time is over or the node takes no jobs.
    """

    start: datetime
    span: int
    items: tuple[Item, ...]
    link: str = ""


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
    now: datetime,
    link: Callable[[str, Slot], str],
) -> list[Lane]:
    """One lane for each node.

    Args:
        nodes: Names, and whether they take jobs.
        link: Makes what a free column of a node shows; a calendar has thousands of them.
    """
    slots = [slot for day in days for slot in day.slots]
    by_node: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: item.start):
        by_node.setdefault(item.node, []).append(item)
    return [
        Lane(
            node,
            available,
            _cells(
                slots,
                by_node.get(node, []),
                lambda slot, node=node, available=available: (
                    link(node, slot) if available and slot.end > now else ""
                ),
            ),
        )
        for node, available in nodes
    ]


def _cells(slots: Sequence[Slot], items: list[Item], link: Callable[[Slot], str]) -> list[Cell]:
    if not items:
        return [Cell(slot.start, 1, (), link(slot)) for slot in slots]
    shown = [
        (
            slot,
            tuple(one for one in items if one.start < slot.end and (one.end is None or one.end > slot.start)),
        )
        for slot in slots
    ]
    cells: list[Cell] = []
    for what, group in groupby(shown, key=lambda pair: pair[1]):
        members = [slot for slot, _ in group]
        if what:
            cells.append(Cell(members[0].start, len(members), what))
        else:
            cells += [Cell(slot.start, 1, (), link(slot)) for slot in members]
    return cells
