"""Pictures of a comparison (SVG), which need no other file."""

from collections.abc import Iterable, Sequence
from html import escape

from carme_runtime.compare.figures import Estimate

COLORS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b", "#79706e",
)  # fmt: skip
_ROW, _BAR, _GAP = 26, 380, 8
#: What a letter takes at most on average, in the widest of the usual fonts of this size.
_LETTER = 8


def bars(rows: Sequence[tuple[str, str, Estimate]], unit: str) -> str:
    """A bar with its interval for each: title, color, figure."""
    longest = max((figure.high for _, _, figure in rows), default=0) or 1
    figures = [f"{figure.median:.2f} {unit}" for _, _, figure in rows]
    left = _widest(title for title, _, _ in rows) + 2 * _GAP
    parts = [_open(left + _BAR + _widest(figures) + 2 * _GAP, _ROW * len(rows) + 10)]
    for place, (title, color, figure) in enumerate(rows):
        y = _ROW * place + 6
        low, end, high = (left + _BAR * value / longest for value in (figure.low, figure.median, figure.high))
        parts += [
            f'<text x="{left - _GAP}" y="{y + 13}" text-anchor="end">{escape(title)}</text>',
            f'<rect x="{left}" y="{y}" width="{end - left:.1f}" height="18" fill="{color}"/>',
            f'<path d="M{low:.1f} {y + 9} H{high:.1f} M{low:.1f} {y + 4} v10 M{high:.1f} {y + 4} v10" '
            'stroke="currentColor" fill="none"/>',
            f'<text x="{high + _GAP:.1f}" y="{y + 13}">{escape(figures[place])}</text>',
        ]
    return "\n".join([*parts, "</svg>"])


def curves(lines: Sequence[tuple[str, str, Sequence[tuple[int, Estimate]]]]) -> str:
    """Speed-up over ranks of each, with its interval, against the ideal: title, color, points."""
    most = max((ranks for _, _, points in lines for ranks, _ in points), default=1)
    highest = max([most, *(one.high for _, _, points in lines for _, one in points)])
    left, top, width, height = 50, 14, 320, 240

    def x(ranks: float) -> float:
        return left + width * (ranks - 1) / max(most - 1, 1)

    def y(value: float) -> float:
        return top + height * (1 - value / highest)

    counts = sorted({1, *(ranks for _, _, points in lines for ranks, _ in points)})
    right = left + width + 30
    parts = [
        _open(right + 26 + _widest(["ideal", *(title for title, _, _ in lines)]), top + height + 50),
        f'<path d="M{left} {top} V{top + height} H{left + width}" fill="none" stroke="currentColor"/>',
        f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">ranks</text>',
        f'<path d="M{x(1):.1f} {y(1):.1f} L{x(most):.1f} {y(most):.1f}" stroke="#888" '
        'stroke-dasharray="5 4" fill="none"/>',
    ]
    for count in counts:
        parts += [
            f'<text x="{x(count):.1f}" y="{top + height + 18}" text-anchor="middle">{count}</text>',
            f'<text x="{left - 8}" y="{y(count) + 4:.1f}" text-anchor="end">{count}</text>',
        ]
    parts += [
        f'<path d="M{right} {top + 6} h18" stroke="#888" stroke-dasharray="5 4"/>'
        f'<text x="{right + 26}" y="{top + 10}">ideal</text>'
    ]
    for place, (title, color, points) in enumerate(lines, 1):
        path = " L".join(f"{x(ranks):.1f} {y(one.median):.1f}" for ranks, one in points)
        at = top + 10 + 20 * place
        parts += [
            f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>',
            *(
                f'<path d="M{x(ranks):.1f} {y(one.low):.1f} V{y(one.high):.1f}" stroke="{color}"/>'
                f'<circle cx="{x(ranks):.1f}" cy="{y(one.median):.1f}" r="4" fill="{color}">'
                f"<title>{escape(title)}: {one.median:.2f}</title></circle>"
                for ranks, one in points
            ),
            f'<rect x="{right}" y="{at - 8}" width="18" height="8" fill="{color}"/>'
            f'<text x="{right + 26}" y="{at}">{escape(title)}</text>',
        ]
    return "\n".join([*parts, "</svg>"])


def _widest(texts: Iterable[str]) -> int:
    """The room that the longest of them needs, in pixels."""
    return _LETTER * max(map(len, texts), default=0)


def _open(width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" fill="currentColor" role="img">'
    )
