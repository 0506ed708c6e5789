"""The clocks of the first node's processors, and how often heat has slowed them down."""

import statistics
from collections.abc import Iterable
from pathlib import Path

_FOLDER, _LIST = Path("/sys/devices/system/cpu"), Path("/proc/cpuinfo")


def megahertz(cores: Iterable[int], folder: Path = _FOLDER, listed: Path = _LIST) -> float | None:
    """The clock of these cores at this moment, in the median; None: unknown.

    Args:
        cores: By number.
        folder: Of the kernel, with a folder for each core.
        listed: What says it where the kernel does not set the clock itself, as in virtual machines.
    """
    cores = list(cores)
    try:
        files = [folder / f"cpu{number}/cpufreq/scaling_cur_freq" for number in cores]
        return statistics.median(int(file.read_text()) / 1000 for file in files)
    except (OSError, ValueError):
        pass
    try:
        blocks = [_fields(block) for block in listed.read_text().split("\n\n")]
        clocks = {int(block["processor"]): float(block["cpu MHz"]) for block in blocks if "cpu MHz" in block}
        return statistics.median(clocks[number] for number in cores)
    except (OSError, ValueError, KeyError):
        return None


def slowdowns(cores: Iterable[int], folder: Path = _FOLDER) -> int | None:
    """How often heat has slowed down one of these cores since the machine started; None: unknown."""
    try:
        files = [folder / f"cpu{number}/thermal_throttle/core_throttle_count" for number in cores]
        return sum(int(file.read_text()) for file in files)
    except (OSError, ValueError):
        return None


def slowdowns_since(before: int | None, now: int | None) -> int:
    """How many came between two looks of `slowdowns`: 0 where one of them is unknown."""
    return 0 if before is None or now is None else now - before


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
