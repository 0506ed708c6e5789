"""What every benchmark reports: the machine, and rows that say what was aimed at and whether it holds."""

import json
import math
import os
import platform
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Growth from a tenth of a size to the size that counts as linear, with room for what a busy machine adds.
LINEAR = 12.0


def tidy_up_when_ended() -> None:
    """Let SIGTERM end the program as Ctrl-C does, so that nothing that it started or made stays behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def machine() -> dict[str, Any]:
    """Processor, cores, kernel, Python, the load at this moment, and the command."""
    cpu = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    load = os.getloadavg()[0]
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(load, 1),
        "command": " ".join(sys.argv),
    }


def row(
    name: str,
    unit: str,
    figure: float | None,
    /,
    *,
    peers: Mapping[str, float | None] | None = None,
    floor: float | None = None,
    aim: str = "",
    holds: bool | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One row of a report.

    Args:
        name: What was measured.
        unit: Of all figures of the row.
        figure: Carme's figure; None if it could not be measured.
        peers: Figures of the peers, by name.
        floor: The lower bound.
        aim: The aim in words; empty if there is none.
        holds: Whether the aim was reached; None if there is none.
        more: Further figures, for the JSON alone.
    """

    def short(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        "name": name,
        "unit": unit,
        "ours": short(figure),
        "peers": {peer: short(value) for peer, value in (peers or {}).items()},
        "floor": short(floor),
        "aim": aim,
        "holds": holds,
        **more,
    }


def growth_row(
    name: str, unit: str, small: float, large: float, most: float | None = None, **more: Any
) -> dict[str, Any]:
    """One row of what a large site costs, with what a tenth of it costs beside it.

    Args:
        name: What was measured.
        unit: Of all figures of the row.
        small: The figure at a tenth of the size.
        large: The figure at the size.
        most: What it must stay under; None: growth alone counts.
        more: Further figures, for the JSON alone.
    """
    aim = f"under {most:g}, and growth no worse than linear" if most else "growth no worse than linear"
    holds = large <= LINEAR * small and (most is None or large < most)
    return row(name, unit, large, peers={"a tenth": small}, aim=aim, holds=holds, **more)


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows for people: a column for us, for the floor, and for each peer."""
    peers = list(dict.fromkeys(peer for each in rows for peer in each["peers"]))
    width = max((len(each["name"]) for each in rows), default=0) + 2
    heads = ["ours", "floor", *peers]
    columns = [max(10, len(head) + 2) for head in heads]
    print(f"{'':{width}}{'unit':10}" + "".join(f"{h:>{w}}" for h, w in zip(heads, columns, strict=True)))
    for each in rows:
        cells = [each["ours"], each["floor"], *(each["peers"].get(peer) for peer in peers)]
        shown = "".join(
            f"{'-' if cell is None else cell:>{w}}" for cell, w in zip(cells, columns, strict=True)
        )
        verdict = {True: "holds: ", False: "MISSED: ", None: ""}[each["holds"]] + each["aim"]
        print(f"{each['name']:{width}}{each['unit']:10}{shown}   {verdict}")


def write_json(file: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    """The report for programs."""
    content = _finite({"machine": machine(), "aims": rows, **more})
    file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The same with None for what is not a number or infinite: JSON has no words for these."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
