"""Graphs for people: a table, and a drawing."""

from html import escape

from carme_runtime.graph.model import Graph, Operator

_HEAD = (
    "operator",
    "layer",
    "kind",
    "forward ms",
    "backward ms",
    "held",
    "workspace",
    "parameters",
    "output",
)
_WIDTH, _ROW, _BAR = 1000, 20, 220
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")


def size_text(size: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def columns(rows: list[tuple[str, ...]], left: int) -> str:
    """Rows as text; the first `left` columns begin at the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def table(graph: Graph) -> str:
    """One line per operator, with a sum."""
    rows: list[tuple[str, ...]] = [_HEAD]
    n = graph.samples
    for o in graph.operators:
        costs = (o.held_bytes, o.workspace_bytes, graph.parameter_bytes(o.parameters), _output(graph, o))
        times = (f"{o.forward_ms(n):.3f}", f"{o.backward_ms(n):.3f}")
        rows.append((o.name, o.module, o.kind, *times, *map(size_text, costs)))
    operators = graph.operators
    rows.append(
        (
            "all",
            "",
            f"{len(operators)} operators",
            f"{sum(o.forward_ms(n) for o in operators):.3f}",
            f"{sum(o.backward_ms(n) for o in operators):.3f}",
            size_text(sum(o.held_bytes for o in operators)),
            size_text(max(o.workspace_bytes for o in operators)),
            size_text(graph.parameter_bytes(graph.parameter)),
            "",
        )
    )
    head = f"{graph.source}, measured on {graph.device} with {n} samples. Links: {graph.links.source}."
    return f"{head}\n{columns(rows, left=3)}\n"


def drawing(graph: Graph, cuts: tuple[int, ...] = ()) -> str:
    """A picture (SVG) that needs no other file: operators from top to bottom, with bars for their times.

    Arcs at the left are values that skip operators. `cuts` are places before which another device begins.
    """
    height = _ROW * (len(graph.operators) + 3)
    longest = max((_time(graph, o) for o in graph.operators), default=0) or 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="16">{escape(graph.source)}: {len(graph.operators)} operators, {graph.samples} '
        "samples. Bars: forward and backward time.</text>",
    ]
    part = 0
    for place, operator in enumerate(graph.operators):
        y = _ROW * (place + 2)
        if place in cuts:
            part += 1
            parts.append(
                f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="black" stroke-dasharray="6 3"/>'
            )
        length = _BAR * _time(graph, operator) / longest
        name = escape(f"{operator.name} ({operator.module})" if operator.module else operator.name)
        parts += [
            f'<rect x="160" y="{y + 3}" width="{length:.1f}" height="13" fill="{_COLORS[part % 8]}"/>',
            f'<text x="{170 + _BAR}" y="{y + 14}">{name}</text>',
            f'<text x="760" y="{y + 14}">{_time(graph, operator):.3f} ms, held '
            f"{size_text(operator.held_bytes)}</text>",
        ]
        parts += _arcs(graph, place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _arcs(graph: Graph, place: int) -> list[str]:
    arcs = []
    for name in graph.operators[place].outputs:
        for user in graph.users[name]:
            distance = user - place
            if distance > 1 and user < len(graph.operators):
                y, y2 = (_ROW * (at + 2) + 10 for at in (place, user))
                x = 155 - min(20 + 3 * distance, 150)
                arcs.append(f'<path d="M155 {y} C {x} {y} {x} {y2} 155 {y2}" fill="none" stroke="#888"/>')
    return arcs


def _time(graph: Graph, operator: Operator) -> float:
    return operator.forward_ms(graph.samples) + operator.backward_ms(graph.samples)


def _output(graph: Graph, operator: Operator) -> int:
    return sum(graph.value[name].bytes for name in operator.outputs)
