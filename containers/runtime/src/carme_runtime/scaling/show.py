"""Predictions for people, a table and a curve, and for programs."""

import dataclasses
import math
from html import escape
from typing import Any

from carme_runtime.graph.show import columns
from carme_runtime.options import USUAL_EFFICIENCY
from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.scaling.prediction import NONE, Point, Prediction, Remedy

_RESTLESS = 0.2  # standard deviation of steps, as a part of them, from which on a probe is rough
_LATE = (
    "All gradients are taken to be complete at the end of the backward pass, as nothing showed when each was."
)
_HEAD = ("ranks", "batch each", "ms a step", "80 % interval", "speed-up", "efficiency", "rank-hours", "limit")
_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 640, 420, 60, 40, 400, 320
_COLORS = {
    "communication": "#e45756",
    "skinny matrices": "#f58518",
    "input": "#b279a2",
    "memory": "#9d755d",
    "fixed work": "#eeca3b",
    NONE: "#54a24b",
}


def table(prediction: Prediction, efficiency: float = USUAL_EFFICIENCY) -> str:
    """Both ways of scaling, and what follows from them.

    Args:
        efficiency: In percent, for which the most ranks are named.
    """
    profile = prediction.profile
    parts = [
        f"{profile.model} on {profile.device}, batch {prediction.batch}, "
        f"{show_size(profile.bytes)} of gradients; links {prediction.machine.links.source}; "
        f"{counted(prediction.machine.ranks_per_node)} a node.",
        f"\nStrong scaling: all ranks share a batch of {prediction.batch}.",
        _rows(prediction.strong),
        f"\nWeak scaling: each rank has a batch of {prediction.batch}.",
        _rows(prediction.weak),
        "",
        *advice(prediction, efficiency),
        *([_LATE] if profile.has_late_gradients else []),
    ]
    reasons = list(dict.fromkeys(r for p in (*prediction.strong, *prediction.weak) for r in p.extrapolated))
    parts += [f"* extrapolated: {'; '.join(reasons)}."] if reasons else []
    return "\n".join(parts) + "\n"


def advice(prediction: Prediction, efficiency: float = USUAL_EFFICIENCY) -> list[str]:
    """Sentences about what to ask for; `efficiency` as in `table`."""
    knee = next(point for point in prediction.strong if point.ranks == prediction.knee)
    fastest, last = prediction.fastest, prediction.strong[-1]
    at = next((point for point in prediction.strong if point.ranks > knee.ranks), last)
    lines = [
        f"With an efficiency of {efficiency:g} % or more, "
        f"{counted(prediction.most_ranks(efficiency / 100))} can share the batch.",
        f"{choice(knee)}; {choice(fastest)}." if fastest.ranks != knee.ranks else f"{choice(knee)}.",
    ]
    if knee.ranks < last.ranks:
        lines.append(f"More than {counted(knee.ranks)} bring little: the limit is {_reason(at, prediction)}.")
    elif last.limit != NONE:
        lines.append(f"The limit with {counted(last.ranks)} is {_reason(last, prediction)}.")
    if prediction.remedies:
        remedies = "; ".join(map(_remedy, prediction.remedies))
        lines.append(f"What would move the limit: {remedies}.")
    elif at.limit != NONE:
        lines.append(
            "Neither a batch twice as large, bf16 on the wire, a faster network nor staged data would make "
            "it 5 % faster."
        )
    if (spread := prediction.profile.spread) >= _RESTLESS:
        lines.append(
            f"The probe's steps differ by {100 * spread:.0f} % (standard deviation), so take all of this as "
            "rough: others use the machine, or batches take different times. Measure again in a job of your "
            "own."
        )
    return lines


def _remedy(remedy: Remedy) -> str:
    return f"{remedy.change} ({remedy.faster:.2f} times as fast)" if remedy.faster > 1 else remedy.change


def choice(point: Point) -> str:
    """A number of ranks in a few words."""
    return (
        f"{counted(point.ranks)}: {point.speedup:.1f} times as fast for {point.cost:.2f} times the rank-hours"
    )


def counted(ranks: int) -> str:
    """A number of ranks, in words."""
    return f"{ranks} rank{'s' * (ranks != 1)}"


def _reason(point: Point, prediction: Prediction) -> str:
    if point.limit == NONE:
        return "that the slowest rank keeps the others waiting"
    skinny = prediction.profile.skinny_layers
    if point.limit == "skinny matrices" and skinny and skinny[0][1] > 1.1:
        name, factor = skinny[0]
        return f"skinny matrices (in {name} a sample costs {factor:.1f} times as much in small batches)"
    return point.limit


def _rows(points: tuple[Point, ...]) -> str:
    rows: list[tuple[str, ...]] = [_HEAD]
    for point in points:
        rows.append(
            (
                f"{point.ranks}{'*' if point.extrapolated else ''}",
                f"{point.batch:g}",
                f"{point.step.ms:.1f}",
                f"{point.low:.1f} to {point.high:.1f}",
                f"{point.speedup:.2f}",
                f"{100 * point.efficiency:.0f} %",
                f"{point.cost:.2f}",
                point.limit,
            )
        )
    return columns(rows, left=0)


def as_dict(prediction: Prediction, efficiency: float = USUAL_EFFICIENCY) -> dict[str, Any]:
    """For programs; `version` counts changes of names and meanings, and `efficiency` is as in `table`."""

    def points(curve: tuple[Point, ...]) -> list[dict[str, Any]]:
        return [
            {
                "ranks": p.ranks,
                "batch": p.batch,
                "step_ms": p.step.ms,
                "interval_ms": [p.low, p.high],
                "parts_ms": {k: v for k, v in dataclasses.asdict(p.step).items() if k != "ms"},
                "speedup": p.speedup,
                "efficiency": p.efficiency,
                "rank_hours": p.cost,
                "limit": p.limit,
                "extrapolated": list(p.extrapolated),
            }
            for p in curve
        ]

    return {
        "version": 1,
        "model": prediction.profile.model,
        "device": prediction.profile.device,
        "batch": prediction.batch,
        "links": prediction.machine.links.source,
        "ranks_per_node": prediction.machine.ranks_per_node,
        "strong": points(prediction.strong),
        "weak": points(prediction.weak),
        "knee": prediction.knee,
        "most_ranks_with_70_percent": prediction.most_ranks(0.7),
        "efficiency_percent": efficiency,
        "most_ranks_with_efficiency": prediction.most_ranks(efficiency / 100),
        "remedies": [{"what": r.change, "faster": r.faster} for r in prediction.remedies],
        "advice": advice(prediction, efficiency),
    }


def drawing(prediction: Prediction) -> str:
    """The curves (SVG), in a picture that needs no other file."""
    most = max(prediction.weak[-1].ranks, 2)

    def x(ranks: float) -> float:
        return _LEFT + _PLOT_WIDTH * math.log2(ranks) / math.log2(most)

    def y(speedup: float) -> float:
        share = math.log2(max(speedup, 0.5) * 2) / math.log2(most * 2)  # from 0.5 upwards
        return _TOP + _PLOT_HEIGHT * (1 - share)

    def line(points: list[tuple[float, float]], style: str) -> str:
        return f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" fill="none" {style}/>'

    strong, weak = prediction.strong, prediction.weak
    # The slower the step, the smaller the speed-up.
    above = [(x(p.ranks), y(p.speedup * p.step.ms / p.low)) for p in strong]
    below = [(x(p.ranks), y(p.speedup * p.step.ms / p.high)) for p in strong]
    band = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*above, *reversed(below)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{escape(prediction.profile.model)}, batch {prediction.batch}: '
        "speed-up over ranks</text>",
        *_axes([p.ranks for p in weak], x, y),
        f'<polygon points="{band}" fill="#4c78a8" opacity="0.2"/>',
        line([(x(1), y(1)), (x(most), y(most))], 'stroke="#888" stroke-dasharray="5 4"'),
        line([(x(p.ranks), y(p.speedup)) for p in weak], 'stroke="#72b7b2" stroke-width="1.5"'),
        line([(x(p.ranks), y(p.speedup)) for p in strong], 'stroke="#4c78a8" stroke-width="2"'),
    ]
    parts += [
        f'<circle cx="{x(p.ranks):.1f}" cy="{y(p.speedup):.1f}" r="5" fill="{_COLORS[p.limit]}"'
        f'{" stroke-dasharray=" + chr(34) + "2 2" + chr(34) if p.extrapolated else ""} stroke="black">'
        f"<title>{escape(choice(p))}, limit: {p.limit}</title></circle>"
        for p in strong
    ]
    legend = _legend([p.limit for p in strong], any(p.extrapolated for p in strong))
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def _axes(counts: list[int], x: Any, y: Any) -> list[str]:
    right, bottom = _LEFT + _PLOT_WIDTH, _TOP + _PLOT_HEIGHT
    parts = [
        f'<path d="M{_LEFT} {_TOP} V{bottom} H{right}" fill="none" stroke="black"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{bottom + 40}" text-anchor="middle">ranks</text>',
    ]
    for count in counts:
        parts += [
            f'<text x="{x(count):.1f}" y="{bottom + 18}" text-anchor="middle">{count}</text>',
            f'<text x="{_LEFT - 8}" y="{y(count) + 4:.1f}" text-anchor="end">{count}</text>',
            f'<line x1="{_LEFT}" x2="{right}" y1="{y(count):.1f}" y2="{y(count):.1f}" stroke="#eee"/>',
        ]
    return parts


def _legend(limits: list[str], are_some_extrapolated: bool) -> list[str]:
    left = _LEFT + _PLOT_WIDTH + 20
    entries = [("#888", "ideal"), ("#4c78a8", "strong, 80 %"), ("#72b7b2", "weak")]
    parts = [
        f'<rect x="{left}" y="{_TOP + 20 * place}" width="14" height="4" fill="{color}"/>'
        f'<text x="{left + 20}" y="{_TOP + 7 + 20 * place}">{text}</text>'
        for place, (color, text) in enumerate(entries)
    ]
    parts.append(f'<text x="{left}" y="{_TOP + 90}">Limit:</text>')
    names = list(dict.fromkeys(limits))
    parts += [
        f'<circle cx="{left + 7}" cy="{_TOP + 106 + 20 * place}" r="5" fill="{_COLORS[limit]}"/>'
        f'<text x="{left + 20}" y="{_TOP + 110 + 20 * place}">{limit}</text>'
        for place, limit in enumerate(names)
    ]
    if are_some_extrapolated:
        y = _TOP + 106 + 20 * len(names)
        parts.append(
            f'<circle cx="{left + 7}" cy="{y}" r="5" fill="none" stroke="black" stroke-dasharray="2 2"/>'
            f'<text x="{left + 20}" y="{y + 4}">extrapolated</text>'
        )
    return parts
