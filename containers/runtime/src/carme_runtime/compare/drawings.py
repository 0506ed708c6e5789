"""Pictures of a comparison (SVG), which need no other file."""

from collections.abc import Iterable, Sequence
from html import escape

from carme_runtime.compare.figures import Estimate

COLORS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b", "#79706e",
    "#1b4965", "#a0c878", "#d67195",
)  # fmt: skip
_ROW, _BAR, _GAP = 44, 380, 8
_LINE = 20  # of a legend
#: What a letter takes at most on average, in the widest of the usual fonts of this size.
_LETTER = 8
#: How far a picture reaches, in its largest median: intervals of two to four values may be much longer.
_REACH = 1.5


def bars(rows: Sequence[tuple[str, str, Estimate]], unit: str, label: str) -> str:
    """A bar with its interval for each, below its title: title, color, figure. `label` says what they are.

    Intervals that go on beyond the picture end with an arrow.
    """
    longest = _most(figure for _, _, figure in rows) or 1
    figures = [f"{figure.median:.2f} {unit}" for _, _, figure in rows]
    # Titles stand above the bars, so that the picture is not wide: telephones would make its letters small.
    width = max(_BAR + _widest(figures) + 2 * _GAP, _widest(title for title, _, _ in rows) + _GAP)
    parts = [_open(width, _ROW * len(rows), label)]
    for place, (title, color, figure) in enumerate(rows):
        y = _ROW * place + 18
        low, end = (_BAR * value / longest for value in (figure.low, figure.median))
        high = _BAR * min(figure.high / longest, 1)
        parts += [
            f'<text x="0" y="{y - 4}">{escape(title)}</text>',
            f'<rect x="0" y="{y}" width="{end:.1f}" height="18" fill="{color}"/>',
            f'<text x="{high + _GAP:.1f}" y="{y + 13}">{escape(figures[place])}</text>',
        ]
        if figure.has_interval:
            is_open = figure.high > longest
            tip = f"M{high - 6:.1f} {y + 4} l6 5 l-6 5" if is_open else f"M{high:.1f} {y + 4} v10"
            parts += [
                f'<path d="M{low:.1f} {y + 9} H{high:.1f} M{low:.1f} {y + 4} v10 {tip}" '
                'stroke="currentColor" fill="none"/>'
            ]
    return "\n".join([*parts, "</svg>"])


def curves(lines: Sequence[tuple[str, str, Sequence[tuple[int, Estimate]]]], label: str) -> str:
    """Speed-up over ranks of each, with its interval, against the ideal: title, color, points.

    A color that comes again is dashed. Intervals that go on beyond the picture end with an arrow.
    """
    most = max((ranks for _, _, points in lines for ranks, _ in points), default=1)
    highest = max(most, _most(each for _, _, points in lines for _, each in points))
    left, top, width, height = 50, 14, 320, 240

    def x(ranks: float) -> float:
        return left + width * (ranks - 1) / max(most - 1, 1)

    def y(value: float) -> float:
        return top + height * (1 - value / highest)

    counts = sorted({1, *(ranks for _, _, points in lines for ranks, _ in points)})
    legend = top + height + 64
    names = _GAP + 26 + _widest(["ideal", *(title for title, _, _ in lines)])
    parts = [
        _open(max(left + width + 30, names), legend + _LINE * len(lines) + _GAP, label),
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
        f'<path d="M{_GAP} {legend - 4} h18" stroke="#888" stroke-dasharray="5 4"/>'
        f'<text x="{_GAP + 26}" y="{legend}">ideal</text>'
    ]
    drawn: set[str] = set()
    for place, (title, color, points) in enumerate(lines, 1):
        dashed = ' stroke-dasharray="5 4"' if color in drawn else ""
        drawn.add(color)
        path = " L".join(f"{x(ranks):.1f} {y(each.median):.1f}" for ranks, each in points)
        at = legend + _LINE * place
        parts += [
            f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashed}/>',
            *(
                _point(x(ranks), y(each.low), y(each.median), y(each.high), top, color)
                for ranks, each in points
            ),
            f'<path d="M{_GAP} {at - 4} h18" stroke="{color}" stroke-width="4"{dashed}/>'
            f'<text x="{_GAP + 26}" y="{at}">{escape(title)}</text>',
        ]
    return "\n".join([*parts, "</svg>"])


def _widest(texts: Iterable[str]) -> int:
    """The room that the longest of them needs, in pixels."""
    return _LETTER * max(map(len, texts), default=0)


def _most(figures: Iterable[Estimate]) -> float:
    """What a picture reaches to: all intervals, if they are not too long to leave anything of the medians."""
    intervals = list(figures)
    reach = _REACH * max((each.median for each in intervals), default=0)
    return min(max((each.high for each in intervals), default=0), reach)


def _point(x: float, low: float, middle: float, high: float, top: float, color: str) -> str:
    """Args: places in the picture, the interval's ends among them; `top` is the picture's edge."""
    tip = f" M{x - 5:.1f} {top + 6} L{x:.1f} {top} L{x + 5:.1f} {top + 6}" if high < top else ""
    return (
        f'<path d="M{x:.1f} {low:.1f} V{max(high, top):.1f}{tip}" stroke="{color}" fill="none"/>'
        f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="{color}"/>'
    )


def _open(width: int, height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" fill="currentColor" role="img" '
        f'aria-label="{escape(label)}">'
    )
