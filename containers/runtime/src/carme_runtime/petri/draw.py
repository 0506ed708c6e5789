"""Draws a net: places are circles, transitions are boxes, tokens flow from left to right.

While it runs places have the number of their tokens, and transitions those of their tasks that run and have
ended.
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from carme_runtime.petri.definition import Definition
from carme_runtime.petri.model import Arc, Place, Transition, show_amount

_COLUMN, _ROW, _RADIUS, _EDGE = 150, 80, 20, 60
_Node = Place | Transition


class Drawing(str):
    """SVG, which notebooks show."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, file: str | Path) -> None:
        """Write it to a file."""
        Path(file).write_text(self, encoding="utf-8")


def draw(net: Definition, status: Mapping[str, Any] | None = None) -> Drawing:
    """The net as SVG, as it is at the start, or as the `status` of a run says."""
    tokens = status["places"] if status else {name: len(p.tokens) for name, p in net.places.items()}
    running, ended = (status["running"], status["fired"]) if status else ({}, {})
    where = _layout(net)
    width = max((x for x, _ in where.values()), default=0) + _EDGE
    height = max((y for _, y in where.values()), default=0) + _EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>Petri net {escape(net.name)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="#555"/></marker><marker id="circle" '
        'viewBox="0 0 10 10" '
        'refX="9" refY="5" markerWidth="9" markerHeight="9"><circle cx="5" cy="5" r="4" fill="white" '
        'stroke="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for transition in net.transitions.values():
        for arc in transition.flow.inputs:
            parts.append(_arc(arc, where[arc.place], where[transition]))
        for arc in transition.flow.outputs:
            parts.append(_arc(arc, where[transition], where[arc.place]))
    parts += [_place(place, *where[place], tokens.get(place.name, 0)) for place in net.places.values()]
    parts += [
        _transition(each, *where[each], running.get(each.name, 0), ended.get(each.name, 0))
        for each in net.transitions.values()
    ]
    return Drawing("\n".join([*parts, "</svg>"]))


def _layout(net: Definition) -> dict[_Node, tuple[int, int]]:
    """Columns by the distance from where tokens come in."""
    after: dict[_Node, list[_Node]] = {node: [] for node in (*net.places.values(), *net.transitions.values())}
    filled = set()
    for transition in net.transitions.values():
        after[transition] = [arc.place for arc in transition.flow.outputs]
        filled.update(after[transition])
        for arc in transition.flow.arguments:
            after[arc.place].append(transition)
    columns: dict[_Node, int] = {}
    first: list[_Node] = [p for p in net.places.values() if p not in filled or p.tokens or p.entry]
    first += [t for t in net.transitions.values() if not t.flow.arguments]
    for root in (*first, *after):
        if root in columns:
            continue
        columns[root] = 0 if isinstance(root, Place) else 1
        level = [root]
        while level:
            following = [(node, columns[each] + 1) for each in level for node in after[each]]
            level = []
            for node, column in following:
                if node not in columns:
                    columns[node] = column
                    level.append(node)
    rows: dict[int, int] = {}
    where = {}
    for node, column in columns.items():
        row = rows[column] = rows.get(column, -1) + 1
        where[node] = (_EDGE + column * _COLUMN, _EDGE + row * _ROW)
    return where


def _arc(arc: Arc, start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    length = max(1.0, ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    # A little to one side, so that arcs there and back are two lines.
    x1, y1 = x1 + dx * 22 - dy * 5, y1 + dy * 22 + dx * 5
    x2, y2 = x2 - dx * 22 - dy * 5, y2 - dy * 22 + dx * 5
    marker = {"take": "arrow", "read": "", "empty": "circle", "count": ""}[arc.kind]
    style = {"read": ' stroke-dasharray="5 3"', "count": ' stroke-dasharray="1 3"'}.get(arc.kind, "")
    ending = f' marker-end="url(#{marker})"' if marker else ""
    line = f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="#555"{style}{ending}/>'
    if arc.weight == 1:
        return line
    return line + f'<text x="{(x1 + x2) / 2:.0f}" y="{(y1 + y2) / 2 - 5:.0f}">{arc.weight}</text>'


def _place(place: Place, x: int, y: int, tokens: int) -> str:
    hint = place.type.__name__ + (f", at most {place.capacity}" if place.capacity is not None else "")
    inside = str(tokens) if tokens else ""
    return (
        f'<g><title>{escape(place.name)}: {escape(hint)}</title><circle cx="{x}" cy="{y}" r="{_RADIUS}" '
        f'fill="#eef5fb" stroke="#1f6fb2"/><text x="{x}" y="{y + 4}" text-anchor="middle">{inside}</text>'
        f'<text x="{x}" y="{y + 35}" text-anchor="middle">{escape(place.name)}</text></g>'
    )


def _transition(transition: Transition, x: int, y: int, running: int, ended: int) -> str:
    needs = ", ".join(f"{name}:{show_amount(count)}" for name, count in transition.needs.items())
    hint = transition.name + (f" (needs {needs})" if needs else "")
    hint += f": {running} running, {ended} ended" if running or ended else ""
    fill, inside = ("#f5b95a", f"{running} ▸") if running else ("#fdf3e3", "")
    inside = inside or (str(ended) if ended else "")
    return (
        f'<g><title>{escape(hint)}</title><rect x="{x - 18}" y="{y - 18}" width="36" height="36" rx="3" '
        f'fill="{fill}" stroke="#b2701f"/><text x="{x}" y="{y + 4}" text-anchor="middle">{inside}</text>'
        f'<text x="{x}" y="{y + 35}" text-anchor="middle">'
        f"{escape(transition.name)}</text></g>"
    )
