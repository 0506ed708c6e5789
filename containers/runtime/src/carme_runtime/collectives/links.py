"""The links between nodes: how long messages take on them, and which way of reducing follows from that.

CARME_LINKS is a JSON file of `{"times": [[BYTES, MICROSECONDS], ...]}`, as `carme_runtime.gaspi.links` writes
it (`carme-run -m carme_runtime.gaspi.links FILE`); or `measure`: measure when the run starts. By default the
links are taken for Ethernet of 10 Gbit/s. The choice decides in which order numbers are added: with the
default or a file results have the same bits in every run, with `measure` two runs may choose differently.
"""

import json
import os
from pathlib import Path
from typing import Any

from carme_runtime.collectives.errors import InvalidCall

ALGORITHMS = {"auto": 0, "direct": 1, "ring": 2, "halving": 3}
LINKS, ALLREDUCE = "CARME_LINKS", "CARME_ALLREDUCE"
_MEASURE = "measure"


def algorithm(name: str | None) -> int:
    """The core's number of an algorithm; None: of the one that the environment names."""
    source = f"{ALLREDUCE}=" if name is None else "algorithm="
    name = os.environ.get(ALLREDUCE, "auto") if name is None else name
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise InvalidCall(
            f"{source}{name} is no way to reduce between nodes.", f"Choose from {', '.join(ALGORITHMS)}."
        ) from None


def should_measure() -> bool:
    """Whether the links are measured when the run starts."""
    return os.environ.get(LINKS) == _MEASURE


def apply_file(context: Any) -> None:
    """Give the core's context what the file of CARME_LINKS says, if there is one. Raises InvalidCall."""
    name = os.environ.get(LINKS, "")
    if name and name != _MEASURE:
        context.set_link_times(read(Path(name)))


def read(file: Path) -> list[tuple[int, float]]:
    """The times in a file: bytes and microseconds. Raises InvalidCall."""
    try:
        times = [(int(size), float(time)) for size, time in json.loads(file.read_text())["times"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidCall(
            f"{LINKS} names {file}, which holds no times of links ({error}).",
            'Let it hold {"times": [[BYTES, MICROSECONDS], ...]}, or unset the variable.',
        ) from None
    sizes = [size for size, _ in times]
    if (
        len(times) < 2
        or sizes != sorted(set(sizes))
        or sizes[0] < 0
        or any(not 0 <= t < 1e12 for _, t in times)
    ):
        raise InvalidCall(
            f"The times of links in {file} make no sense.",
            "Give at least two sizes that grow, and a time in microseconds for each.",
        )
    return times
