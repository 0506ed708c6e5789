"""Energy that the machine has drawn: its processors by RAPL, its GPUs by NVML, where these can be read."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

_RAPL = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


def energy() -> dict[str, float]:
    """Joules since some moment in the past, by what drew them; without what nobody counts here.

    The processors' counters are those of Linux (power/powercap), which mostly root alone may read; the GPUs'
    is `nvmlDeviceGetTotalEnergyConsumption` of NVML, which Volta and later have.
    """
    found = {"processors": _processors(), "gpus": _gpus()}
    return {name: joules for name, joules in found.items() if joules is not None}


def drawn(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, float]:
    """Joules of each of some steps; without counters that have begun anew meanwhile."""
    spent = {name: after[name] - before[name] for name in before if name in after}
    return {name: joules / steps for name, joules in spent.items() if joules >= 0}


def _processors(root: Path = _RAPL) -> float | None:
    """Of all packages, without their parts, which are counted with them."""
    try:
        return sum(int((zone / "energy_uj").read_text()) for zone in _packages(root)) / 1e6 or None
    except (OSError, ValueError):
        return None


def _packages(root: Path) -> Sequence[Path]:
    """The zone of the whole platform (psys) has no part in the sum, as the packages are in it."""
    zones = [zone for zone in root.glob("intel-rapl:*") if zone.name.count(":") == 1]
    return [zone for zone in zones if (zone / "name").read_text().startswith("package")]


def _gpus() -> float | None:
    counters = _nvml()
    values = [read() for read in counters]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


@functools.cache
def _nvml() -> tuple[Callable[[], float | None], ...]:
    """What reads each GPU's counter; none without the library, or without GPUs."""
    try:
        library = ctypes.CDLL(_NVML)
        if library.nvmlInitWithFlags(0) != 0:
            return ()
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
    except (OSError, AttributeError):
        return ()
    return tuple(functools.partial(_counter, library, number) for number in range(count.value))


def _counter(library: ctypes.CDLL, number: int) -> float | None:
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    with contextlib.suppress(AttributeError):  # a library that is too old
        if (
            library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0
            and library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) == 0
        ):
            return millijoules.value / 1000
    return None
