"""How the commands print: tables for people, JSON for programs."""

import argparse
import json
import unicodedata
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

Item = TypeVar("Item")
WIDEST = 48  # letters of a column


def print_json(value: Any) -> None:
    """A model, or whatever holds models, as JSON."""
    print(json.dumps(to_jsonable_python(value), indent=2, ensure_ascii=False))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be; what is very long makes its own line longer, and no other."""
    cells = [list(titles), *([plain(str(cell)) for cell in row] for row in rows)]
    widths = [
        max(len(cell) if len(cell) <= WIDEST else len(column[0]) for cell in column)
        for column in zip(*cells, strict=True)
    ]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def listed(
    options: argparse.Namespace,
    found: Sequence[Item],
    titles: Sequence[str],
    row: Callable[[Item], Sequence[object]],
    none: str = "",
) -> int:
    """Print what a command that lists has found; its exit code.

    Args:
        options: Whether JSON is wanted.
        titles: Of the columns.
        row: The values of an item in them.
        none: The text where nothing was found; by default the titles alone.
    """
    if options.json:
        print_json(found)
    elif not found and none:
        print(none)
    else:
        print_table(titles, [row(each) for each in found])
    return 0


def printed(options: argparse.Namespace, value: object, *lines: str) -> int:
    """Print what a command has done, `value` for programs and the lines for people; its exit code."""
    if options.json:
        print_json(value)
    else:
        for line in lines:
            print(plain(line))
    return 0


def plain(text: str) -> str:
    """Text of other people's choosing without characters that would steer the terminal."""
    return "".join("?" if unicodedata.category(letter).startswith("C") else letter for letter in text)


def short(text: str, most: int = 40) -> str:
    """The beginning of a text of other people's choosing."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def moment(when: datetime | None) -> str:
    """A moment in local time."""
    return when.astimezone().strftime("%Y-%m-%d %H:%M") if when else "-"


def length(time: timedelta) -> str:
    """A length of time in its two largest units; one that is past is none."""
    seconds = max(0, int(time.total_seconds()))
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes < 5 else f"{minutes} min"


def age(when: datetime) -> str:
    """How long ago a moment was."""
    seconds = max(0, int((datetime.now(UTC) - when).total_seconds()))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
