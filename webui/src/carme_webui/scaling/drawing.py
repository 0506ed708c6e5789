"""The curve of a form's choices, in the page's colours; the table beside it says the same."""

import math
from collections.abc import Callable, Sequence

from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from carme.scaling import Choice

__all__ = ["drawing"]

Place = Callable[[float], float]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 190, 34, 12, 12, 34


def drawing(choices: Sequence[Choice], chosen: tuple[int, int]) -> SafeString:
    """Speed-up over GPUs as SVG: the ideal one dashed, the 80 % interval as a band, the chosen one ringed.

    Args:
        choices: The smallest first.
        chosen: Nodes and GPUs of each that the form asks for.
    """
    most = max(2, *(one.row.ranks for one in choices))

    def x(ranks: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log2(max(ranks, 1)) / math.log2(most)

    def y(speedup: float) -> float:
        share = math.log2(max(speedup, 0.5) * 2) / math.log2(most * 2)  # from 0.5 upwards
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(share, 1))

    points = [(x(one.row.ranks), y(one.row.speedup)) for one in choices]
    # The slower the step, the smaller the speed-up.
    above = [(x(one.row.ranks), y(one.row.speedup * one.row.step_ms / one.row.low_ms)) for one in choices]
    below = [(x(one.row.ranks), y(one.row.speedup * one.row.step_ms / one.row.high_ms)) for one in choices]
    bottom = _HEIGHT - _BOTTOM
    ticks = sorted({1, most, *(one.row.ranks for one in choices)})
    ticks = [tick for place, tick in enumerate(ticks) if not place or x(tick) - x(ticks[place - 1]) > 16]
    return format_html(
        '<svg class="curve" viewBox="0 0 {} {}" role="img" aria-label="{}">{}'
        '<path class="axis" d="M{} {} V{} H{}"/><text class="title" x="{}" y="{}">{}</text>'
        '<polyline class="ideal" points="{}"/><polygon class="band" points="{}"/>'
        '<polyline class="line" points="{}"/>{}</svg>',
        *(_WIDTH, _HEIGHT, _("Times as fast over GPUs. The table says the same.")),
        _grid(ticks, x, y),
        *(_LEFT, _TOP, bottom, _WIDTH - _RIGHT),
        *((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, _("GPUs; on the left: times as fast")),
        _path([(x(1), y(1)), (x(most), y(most))]),
        _path([*above, *reversed(below)]),
        _path(points),
        format_html_join(
            "",
            '<circle class="{}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>',
            (
                (
                    "point chosen" if is_chosen else "point",
                    *(f"{at[0]:.1f}", f"{at[1]:.1f}", 6 if is_chosen else 3.5),
                    f"{one.row.ranks}: {number_format(round(one.row.speedup, 1), 1)}",
                )
                for one, at in zip(choices, points, strict=True)
                for is_chosen in [(one.nodes, one.gpus_per_node) == chosen]
            ),
        ),
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _grid(ticks: Sequence[int], x: Place, y: Place) -> SafeString:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    return format_html_join(
        "",
        '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/><text class="tick" x="{}" y="{}">{}</text>'
        '<text class="tick side" x="{}" y="{}">{}</text>',
        (
            (
                *(_LEFT, right, f"{y(tick):.1f}", f"{y(tick):.1f}"),
                *(f"{x(tick):.1f}", bottom + 13, tick),
                *(_LEFT - 11, f"{y(tick) + 4:.1f}", tick),  # clear of the ring around the first point
            )
            for tick in ticks
        ),
    )
