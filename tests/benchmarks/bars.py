"""Draws the table of a page of docs/benchmarks as bars, into an SVG file beside the page.

    python tests/benchmarks/bars.py docs/benchmarks/petri.md ...

A page says in a comment what of its table is drawn, where its picture is not one of `plots.py`:

    <!-- bars: ours, Dask, Parsl; us; log -->

That is the columns, the unit, and `log` for an axis on which each step is ten times the one before. With the
unit `% of the aim` numbers are shares of the one in the column `aim`. Rows without a number in these columns
are left out. A test compares page and picture.
"""

from __future__ import annotations

import html
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Drawing", "picture", "read", "table"]

COMMENT = re.compile(r"<!-- bars: (?P<columns>[^;]+); (?P<unit>[^;]+?)(?P<log>; log)? -->")
NUMBER = re.compile(r"-?[\d,]*\.?\d+")
OF_AIM = "% of the aim"
COLORS = ("#1f6fb4", "#8a8f98", "#c2c6cc", "#d98c3f", "#5a9a68")
WIDTH, LABELS, BAR, GAP, VALUES = 640, 210, 14, 8, 70


@dataclass(frozen=True)
class Drawing:
    """What is drawn.

    Attributes:
        columns: The names of the table's columns.
        unit: Of the numbers in them.
        rows: Each with its name, and its numbers in the order of the columns.
        is_logarithmic: Whether the axis is.
    """

    columns: tuple[str, ...]
    unit: str
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    is_logarithmic: bool


def table(page: str) -> list[list[str]]:
    """The cells of a page's only table, its header first, without marks of Markdown.

    Raises:
        ValueError: It has none, or several.
    """
    lines = page.splitlines()
    rulers = [number for number, line in enumerate(lines) if re.fullmatch(r"\|(?:[ :-]+\|)+", line)]
    if len(rulers) != 1:
        raise ValueError(f"The page has {len(rulers)} tables; it should have one.")
    end = rulers[0]
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    rows = [lines[rulers[0] - 1], *lines[rulers[0] + 1 : end]]
    return [[re.sub(r"[*`]", "", cell).strip() for cell in row.strip("|").split("|")] for row in rows]


def read(page: str) -> Drawing | None:
    """What a page lets draw of its table; None where it has no such comment.

    Raises:
        ValueError: A column that it names is missing.
    """
    found = COMMENT.search(page)
    if not found:
        return None
    header, *rows = table(page)
    columns = tuple(name.strip() for name in found["columns"].split(","))
    places = [header.index(name) for name in columns]
    words = [place for place in range(min(places)) if place not in places]
    named: list[tuple[str, tuple[float | None, ...]]] = []
    group = ""
    for cells in rows:
        group = cells[0] or group
        label = " ".join(filter(None, [group, *(cells[place] for place in words if place)]))
        values = tuple(_number(cells[place]) for place in places)
        if found["unit"] == OF_AIM:
            aim = _number(re.sub(r"^[a-z ]+", "", cells[header.index("aim")]))
            values = tuple(value and aim and round(100 * value / aim) for value in values)
        if any(value is not None for value in values):
            named.append((label, values))
    return Drawing(columns, found["unit"], tuple(named), bool(found["log"]))


def _number(cell: str) -> float | None:
    found = NUMBER.match(cell)
    return float(found[0].replace(",", "")) if found else None


def picture(drawing: Drawing) -> str:
    """The drawing as SVG."""
    elements = list(_elements(drawing))
    height = 30 + len(drawing.rows) * GAP + BAR * sum(_drawn(values) for _, values in drawing.rows)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    back = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, back, *elements, "</svg>", ""])


def _drawn(values: tuple[float | None, ...]) -> int:
    return sum(value is not None for value in values)


def _elements(drawing: Drawing) -> Iterator[str]:
    place = 8
    for number, name in enumerate(drawing.columns):
        yield f'<rect x="{place}" y="7" width="10" height="10" fill="{COLORS[number]}"/>'
        yield _text(place + 14, 16, name)
        place += 26 + 7 * len(name)
    yield _text(WIDTH - 8, 16, drawing.unit, "end")
    values = [value for _, row in drawing.rows for value in row if value is not None]
    top = 30
    for label, row in drawing.rows:
        yield _text(LABELS - 6, top + BAR * _drawn(row) / 2 + 4, label, "end")
        for number, value in enumerate(row):
            if value is None:
                continue
            width = round(_share(value, values, drawing.is_logarithmic) * (WIDTH - LABELS - VALUES), 1)
            yield f'<rect x="{LABELS}" y="{top}" width="{width}" height="{BAR - 2}" fill="{COLORS[number]}"/>'
            yield _text(LABELS + width + 4, top + BAR - 4, f"{value:g}")
            top += BAR
        top += GAP


def _share(value: float, values: list[float], is_logarithmic: bool) -> float:
    """The length of a bar, of the longest one."""
    if not is_logarithmic:
        return value / max(values)
    least = math.floor(math.log10(min(value for value in values if value > 0)))
    return (math.log10(value) - least) / (math.log10(max(values)) - least) if value > 0 else 0


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="11" text-anchor="{anchor}">{html.escape(text)}</text>'


def main() -> None:
    """Draw the pictures of the pages that the command line names."""
    for name in sys.argv[1:]:
        drawing = read(Path(name).read_text())
        if drawing is None:
            raise SystemExit(f"{name} has no comment that says what is drawn, like <!-- bars: ours; us -->.")
        Path(name).with_suffix(".svg").write_text(picture(drawing))


if __name__ == "__main__":
    main()
