"""The prediction table of a probe's result: strong scaling for each number of nodes and GPUs of a node.

Who reads it needs no model: the portal and `carme submit` show it while a user chooses nodes and GPUs.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from carme_runtime import strict_json
from carme_runtime.scaling.errors import ScalingError
from carme_runtime.scaling.network import Machine
from carme_runtime.scaling.prediction import Point, strong_points
from carme_runtime.scaling.profiles import Profile, to_dict

MOST_RANKS = 1024
#: Ranks of a node, as a rule its GPUs, and nodes for which rows are made.
RANKS_PER_NODE = (1, 2, 3, 4, 6, 8, 16)
NODES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
_DIGITS = 6


def table_of(profile: Profile) -> dict[str, Any]:
    """What `scale.json` holds as its `curve`.

    Returns:
        `batch` that all ranks share, the `links`, and `rows`: `nodes`, `ranks_per_node`, `step_ms` with the
        80 % interval `low_ms` to `high_ms`, `speedup` over one rank, `efficiency`, `limit`, and whether the
        row is `extrapolated`. Numbers of ranks above the batch have no row.
    """
    most = min(MOST_RANKS, profile.batch)
    rows = []
    for each in RANKS_PER_NODE:
        nodes = [count for count in NODES if count * each <= most]
        points = strong_points(profile, Machine(profile.links, each), [count * each for count in nodes])
        rows += [_row(count, each, point) for count, point in zip(nodes, points, strict=True)]
    return {"batch": profile.batch, "links": profile.links.source, "rows": rows}


def _row(nodes: int, each: int, point: Point) -> dict[str, Any]:
    times = {"step_ms": point.step.ms, "low_ms": point.low, "high_ms": point.high}
    shares = {"speedup": point.speedup, "efficiency": point.efficiency}
    rounded = {name: float(f"{value:.{_DIGITS}g}") for name, value in (times | shares).items()}
    return {
        "nodes": nodes,
        "ranks_per_node": each,
        **rounded,
        "limit": point.limit,
        "extrapolated": bool(point.extrapolated),
    }


def to_json(profile: Profile) -> str:
    """A profile with its table as text."""
    return strict_json.dumps({**to_dict(profile), "curve": table_of(profile)}, indent=1) + "\n"


def save(profile: Profile, file: Path | str, option: str = "--scale-result") -> None:
    """Write a profile with its table to a file, wholly or not at all. Raises ScalingError.

    Args:
        option: That names another file.
    """
    file = Path(file)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(to_json(profile))
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ScalingError(
            f"The result cannot be written to {file} ({error.strerror}).",
            f"Name another file with {option}.",
        ) from None


def changed(profile: Profile, machine: Machine, batch: int | None) -> Profile:
    """The same with other links or another batch of a step."""
    return dataclasses.replace(profile, links=machine.links, batch=batch or profile.batch)
