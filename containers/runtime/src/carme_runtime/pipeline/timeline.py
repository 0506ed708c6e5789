"""A step of a pipeline as a picture: what each stage did when, and below it the schedule on paper."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carme_runtime.pipeline.schedules import BACKWARD, FORWARD, INPUTS, KINDS, WEIGHTS, make
from carme_runtime.pipeline.simulation import chain, simulate

NAMES = {
    FORWARD: "forward pass",
    BACKWARD: "backward pass",
    INPUTS: "gradients of inputs",
    WEIGHTS: "gradients of weights",
}
"""Of the kinds of passes, in profiles and reports."""

WAITING = "waiting"
_COLORS = {FORWARD: "#4c78a8", BACKWARD: "#54a24b", INPUTS: "#72b7b2", WEIGHTS: "#eeca3b"}
_WIDTH, _LEFT, _ROW, _BAR, _HEAD = 1000, 80, 24, 18, 40
_NARROWEST = 12  # a bar that has room for its number


@dataclass(frozen=True)
class Bar:
    """A pass of a micro-batch; times in one unit, from one begin for all stages."""

    kind: str
    micro: int
    begin: float
    end: float


def idle(bars: Sequence[Bar]) -> float:
    """The share of a stage's time, from its first pass to its last, in which it computes nothing."""
    if not bars:
        return 0.0
    window = max(bar.end for bar in bars) - min(bar.begin for bar in bars)
    return 1 - sum(bar.end - bar.begin for bar in bars) / window if window else 0.0


def computed(passes: Iterable[Sequence[Any]], shift: float = 0.0) -> list[Bar]:
    """What of the passes of a rank was no waiting.

    Args:
        passes: Name of NAMES or WAITING, micro-batch, begin and end, as `profile` keeps them.
        shift: How much later the times of the others are.
    """
    kinds = {name: kind for kind, name in NAMES.items()}
    waits = sorted((begin, end) for name, _, begin, end in passes if name == WAITING)
    bars = []
    for name, micro, begin, end in passes:
        if name not in kinds:
            continue
        at = begin
        for first, last in waits:
            if first < end and last > at:
                if first > at:
                    bars.append(Bar(kinds[name], micro, at + shift, first + shift))
                at = min(last, end)
        if at < end:
            bars.append(Bar(kinds[name], micro, at + shift, end + shift))
    return bars


def drawing(steps: Mapping[int, Mapping[str, Any]]) -> str:
    """The last whole step as a picture (SVG) that needs no other file, above the schedule with even passes.

    Args:
        steps: By rank: its `schedule`, `stages`, `micro_batches` and `passes` with times in seconds, and the
            time of day, `clock`, from which they count, as `profile` keeps them. Those of the first pipeline
            are drawn.

    Returns:
        Nothing, where a stage's step is not there.
    """
    first = steps.get(0)
    stages = range(int(first["stages"])) if first else range(0)
    known = [steps[rank] for rank in stages if rank in steps]
    whole = [(step["schedule"], step["micro_batches"]) for step in known]
    if not first or len(known) < len(stages) or len(set(whole)) > 1:
        return ""
    measured = [computed(step["passes"], step["clock"] - first["clock"]) for step in known]
    if not all(measured):
        return ""
    name, micro_batches = whole[0]
    paper = _on_paper(name, len(stages), micro_batches)
    length = max(bar.end for own in measured for bar in own) - min(b.begin for own in measured for b in own)
    formula = 100 * KINDS[name].bubble(len(stages), micro_batches)
    worst = max(map(idle, measured))
    panels = [
        (f"Measured: {1000 * length:.1f} ms, idle at most {100 * worst:.1f} %", measured),
        (f"Schedule {name} with even passes: idle at most {formula:.1f} %", paper),
    ]
    return _picture(panels, len(stages))


def _on_paper(name: str, stages: int, micro_batches: int) -> list[list[Bar]]:
    schedule = make(name, stages, micro_batches)
    run = simulate(schedule, chain(len(schedule.holders)))
    return [
        [Bar(action.kind, action.micro, *run.times[action]) for action in own] for own in schedule.actions
    ]


def _picture(panels: list[tuple[str, list[list[Bar]]]], stages: int) -> str:
    each = _HEAD + stages * _ROW
    height = len(panels) * each + 2 * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (title, rows) in enumerate(panels):
        parts += _panel(number * each, title, rows)
    used = {bar.kind for _, rows in panels for own in rows for bar in own}
    parts += _legend(len(panels) * each + _ROW, [kind for kind in NAMES if kind in used])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(top: int, title: str, rows: list[list[Bar]]) -> list[str]:
    begin = min(bar.begin for own in rows for bar in own)
    length = max(bar.end for own in rows for bar in own) - begin
    scale = (_WIDTH - _LEFT - 70) / (length or 1)
    parts = [f'<text x="10" y="{top + 25}">{title}</text>']
    for stage, own in enumerate(rows):
        y = top + _HEAD + stage * _ROW
        parts.append(f'<text x="10" y="{y + 13}">stage {stage}</text>')
        for bar in own:
            x, width = _LEFT + (bar.begin - begin) * scale, (bar.end - bar.begin) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLORS[bar.kind]}" '
                f'stroke="white" stroke-width="0.5"><title>{NAMES[bar.kind]} of micro-batch {bar.micro}'
                "</title></rect>"
            )
            if width >= _NARROWEST:
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle">{bar.micro}</text>'
                )
        parts.append(f'<text x="{_WIDTH - 60}" y="{y + 13}">{100 * idle(own):.1f} % idle</text>')
    return parts


def _legend(y: int, kinds: list[str]) -> list[str]:
    parts = []
    for place, kind in enumerate(kinds):
        x = _LEFT + 200 * place
        parts.append(f'<rect x="{x}" y="{y - 12}" width="14" height="14" fill="{_COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{NAMES[kind]}</text>')
    return parts
