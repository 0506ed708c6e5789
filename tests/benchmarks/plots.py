"""Draws what benchmarks write with `--json`, as SVG: allreduce, training, portal, staging, sessions, gpu.

python tests/benchmarks/plots.py docs/benchmarks result.json ...
"""

# pyright: reportMissingImports=false

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "carme"  # the same file from the same figures
from matplotlib import pyplot  # noqa: E402

UNITS = {"KiB": 1024, "MiB": 1024 * 1024}
COPIES = re.compile(r"(small_files|rerun|rerun_1_percent)_s$")
STARTS = re.compile(r"start_to_(ready|kernel)_s$")
ALLREDUCE = re.compile(r"(?P<scene>.+?)_(?P<size>\d+)(?P<unit>KiB|MiB)$")


def main() -> None:
    """Read all reports, write a picture of each scene and one of training."""
    if len(sys.argv) < 3:
        raise SystemExit(
            "Use: plots.py FOLDER REPORT.json ...: a folder for the pictures, and at least one report."
        )
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    reports = [json.loads(Path(file).read_text()) for file in sys.argv[2:]]
    rows = [row for report in reports for row in report.get("aims", ())]
    for report in reports:
        if "step_ms_wide_unlimited" in report.get("rows", ()):
            draw_less_memory(folder / "out-of-core.svg", report)
    scenes: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if found := ALLREDUCE.match(row["name"]):
            scenes.setdefault(found["scene"], {})[int(found["size"]) * UNITS[found["unit"]]] = row
    for fixture, by_size in scenes.items():
        draw_sizes(folder / f"allreduce-{fixture.replace('_', '-')}.svg", fixture, by_size)
    if steps := [row for row in rows if row["name"].startswith("step_ms_")]:
        draw_steps(folder / "training-steps.svg", steps)
    if answers := [row for row in rows if row["name"].endswith("_p95_ms")]:
        draw_answers(folder / "portal.svg", answers)
    for name, pattern in {"staging": COPIES, "sessions": STARTS}.items():
        if found := [row for row in rows if pattern.match(row["name"])]:
            draw_seconds(folder / f"{name}.svg", found)


def draw_sizes(file: Path, scene: str, by_size: dict[int, dict[str, Any]]) -> None:
    """Bytes per second that a reduced buffer comes to, over its size: higher is better."""
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    sizes = sorted(by_size)
    names = list(dict.fromkeys(peer for size in sizes for peer in by_size[size]["peers"]))
    for name in ("ours", "floor", *names):
        points = [
            (size, size / 1000 / value)
            for size in sizes
            if (value := by_size[size].get(name) or by_size[size]["peers"].get(name))
        ]
        if points:
            style = {"ours": "o-", "floor": "k:"}.get(name, ".--")
            axes.plot(*zip(*points, strict=True), style, label=name, linewidth=2 if name == "ours" else 1)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB of buffer per second", title=scene)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save(figure, file)


def draw_steps(file: Path, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of a step, as bars: lower is better."""
    figure, axes = pyplot.subplots(figsize=(7, 0.35 * sum(2 + len(row["peers"]) for row in rows) * 0.5 + 1))
    place, ticks, labels = 0.0, [], []
    for row in rows:
        times = {"ours": row["ours"]} | {name: value for name, value in row["peers"].items() if value}
        ticks.append(place + (len(times) - 1) / 2)
        labels.append(row["name"].removeprefix("step_ms_"))
        for name, value in times.items():
            own = name == "ours" or name.startswith("carme")
            axes.barh(place, value / row["ours"], color="tab:blue" if own else "tab:gray")
            axes.text(value / row["ours"], place, f" {name} {value:.3g} ms", va="center", fontsize=5)
            place += 1
        place += 1
    axes.set_yticks(ticks, labels, fontsize=6)
    axes.invert_yaxis()
    axes.set(xlabel="step, ours = 1", xlim=(0, axes.get_xlim()[1] * 1.2))
    save(figure, file)


def draw_answers(file: Path, rows: list[dict[str, Any]]) -> None:
    """Milliseconds within which 95 % of a page's answers arrived, as bars beside the aim: lower is better."""
    figure, axes = pyplot.subplots(figsize=(6, 0.3 * len(rows) + 0.8))
    names = [row["name"].removesuffix("_p95_ms").replace("_", " ") for row in rows]
    bars = axes.barh(names, [row["ours"] for row in rows], color="tab:blue")
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=7)
    axes.axvline(150, color="k", linestyle=":", label="aim")
    axes.invert_yaxis()
    axes.set(xlabel="p95 of an answer, ms")
    axes.legend(fontsize=7)
    save(figure, file)


def draw_seconds(file: Path, rows: list[dict[str, Any]]) -> None:
    """Seconds of each contestant, as bars: lower is better."""
    times = [
        (f"{row['name'].removesuffix('_s').replace('_', ' ')}: {name}", value, name == "ours")
        for row in rows
        for name, value in {"ours": row["ours"], **row["peers"], "floor": row.get("floor")}.items()
        if value
    ]
    figure, axes = pyplot.subplots(figsize=(6, 0.3 * len(times) + 0.8))
    colors = ["tab:blue" if own else "tab:gray" for _, _, own in times]
    bars = axes.barh([name for name, _, _ in times], [value for _, value, _ in times], color=colors)
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    save(figure, file)


def draw_less_memory(file: Path, report: dict[str, Any]) -> None:
    """Milliseconds of a step over the memory that it may take, of two models on a GPU: lower is better."""
    figure, axes = pyplot.subplots(figsize=(6, 3.4))
    for model, style in (("wide", "o-"), ("deep", "s--")):
        rows = [row for name, row in report["rows"].items() if name.startswith(f"step_ms_{model}_")]
        limited = {row["limit_mib"]: row["median"] for row in rows if "limit_mib" in row}
        free = report["rows"][f"step_ms_{model}_unlimited"]
        points = sorted((limited | {free["peak_mib"]: free["median"]}).items())
        axes.plot(*zip(*((mib / 1024, ms) for mib, ms in points), strict=True), style, label=f"{model} model")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set(xlabel="limit of memory, GiB; rightmost: no limit", ylabel="step, ms", title=report["gpu"])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Write without a date, so that equal figures are equal files."""
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
