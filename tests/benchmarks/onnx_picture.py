"""Draws when each worker was at work on which micro-batch, from timelines of `--trace html:FILE`, as SVG.

python tests/benchmarks/onnx_picture.py PICTURE.svg TIMELINE.html ...
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _LEFT, _LANE, _HEAD, _GAP = 900, 90, 12, 34, 8
#: Micro-batches that follow each other differ in colour; lightness distinguishes rounds of colours.
_HUES = 8


@dataclass(frozen=True)
class Firing:
    """A task at work on a micro-batch: nanoseconds from the trace's beginning, and by whom."""

    begin: int
    took: int
    task: str
    batch: int
    worker: str
    node: str


def firings(page: Path) -> list[Firing]:
    """What the workers of a net did for micro-batches, from the timeline of a run."""
    data = json.loads(page.read_text().split('type="application/json">')[1].split("</script>")[0])
    found: list[Firing] = []
    for each in data["rows"]:
        _, _, worker = each["name"].partition(": worker ")
        for begin, took, name, *_ in each["spans"] if worker else ():
            task, _, number = data["names"][name].partition(" of micro-batch ")
            if number:
                found.append(Firing(begin, took, task, int(number), worker, worker.split(" on ")[1]))
    return found


def picture(networks: Sequence[tuple[str, Sequence[Firing]]]) -> str:
    """One panel for each network under the other: a line for each worker, a colour for each micro-batch.

    Args:
        networks: Titles, and what their workers did.
    """
    parts: list[str] = []
    top = 0
    for name, own in networks:
        height, drawn = _panel(name, own, top)
        parts += drawn
        top += height
    style = "text{font:11px sans-serif;fill:#222}.t{font-size:13px;font-weight:bold}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}">'
        f'<style>{style}</style><rect width="{_WIDTH}" height="{top}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _panel(name: str, own: Sequence[Firing], top: int) -> tuple[int, list[str]]:
    first = min(each.begin for each in own)
    length = max(each.begin + each.took for each in own) - first
    scale = (_WIDTH - _LEFT - 10) / max(length, 1)
    lines: dict[str, int] = {}
    drawn = [f'<text class="t" x="4" y="{top + 16}">{escape(name)}, {length / 1e9:.2f} s</text>']
    before, y = "", top + _HEAD - _LANE
    for node, worker in sorted({(each.node, each.worker) for each in own}):
        y += _LANE + (_GAP // 2 if before and node != before else 0)
        if node != before:
            drawn.append(f'<text x="4" y="{y + 10}">{escape(node)}</text>')
        before = node
        lines[worker] = y
        drawn.append(f'<path d="M{_LEFT} {y + 10}H{_WIDTH - 10}" stroke="#ddd"/>')
    for each in own:
        x, width = _LEFT + (each.begin - first) * scale, max(each.took * scale, 0.4)
        hue, light = each.batch % _HUES * 360 // _HUES, 45 + each.batch // _HUES % 3 * 12
        label = f"{escape(each.task)}, micro-batch {each.batch}"
        drawn.append(
            f'<rect x="{x:.1f}" y="{lines[each.worker]}" width="{width:.1f}" height="10" '
            f'fill="hsl({hue},60%,{light}%)"><title>{label}</title></rect>'
        )
    return y + _LANE + _GAP - top, drawn


def main() -> None:
    """Draw timelines, each under its file's name."""
    if len(sys.argv) < 3:
        raise SystemExit("Use: onnx_picture.py PICTURE.svg TIMELINE.html ...")
    Path(sys.argv[1]).write_text(picture([(Path(file).stem, firings(Path(file))) for file in sys.argv[2:]]))


if __name__ == "__main__":
    main()
