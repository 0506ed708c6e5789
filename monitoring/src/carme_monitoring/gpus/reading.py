"""One look at a GPU, in units of the SI; what a GPU does not report is None."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

__all__ = [
    "Gpu",
    "GpuLibrary",
    "GpuLibraryFailed",
    "GpuLibraryMissing",
    "GpuProcess",
    "GpuReading",
    "LibraryState",
]


class LibraryState(StrEnum):
    """How the vendor's library answers."""

    OK = "ok"
    MISSING = "missing"  # neither library nor driver: a node without such GPUs
    FAILED = "failed"
    HANGING = "hanging"


class GpuLibraryMissing(Exception):
    """This node has no such library, or no driver for it."""


class GpuLibraryFailed(Exception):
    """The library is there and cannot be used; the text has its message."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Which GPU, or which MIG instance of one.

    Attributes:
        index: The number in the vendor's order, as text.
        uuid: The name that stays when others are added or lost.
        minor: The number of its device file, by which Slurm hands it out; None if not known.
        mig: `GPU-INSTANCE.COMPUTE-INSTANCE` of a MIG instance, empty for a whole GPU.
        place: Its number from 0, by which Slurm may hand it out as well, where those of device files are
            larger than any such number; else None.
    """

    index: str
    uuid: str
    model: str = ""
    minor: int | None = None
    mig: str = ""
    place: int | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU and the bytes of memory that it holds there."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What one GPU did. Ratios are 0 to 1; counters grow from the driver's start.

    Attributes:
        lost: It does not answer, or not any more; then all else is empty.
        utilization: Share of time in which a kernel ran, over the driver's last sample period.
        memory_activity: Share of time in which its memory was read or written.
        activity: Shares by unit (`sm`, `tensor`, `dram` ...) since the last look, if the GPU measures itself.
        link_rates: Bytes per second by link (`pcie`, `nvlink`) and direction since the last look, likewise.
        throttled: For each reason, whether it slows the clocks down now.
        ecc_errors: By kind (`corrected`, `uncorrected`), since the driver was loaded.
        xids: Errors that the driver reported since the exporter began, by number.
        nvlink_bytes: Counters by direction (`receive`, `transmit`).
        link_errors: Counters by link (`pcie`, `nvlink`) and kind (`replay`, `crc`, `recovery`).
    """

    gpu: Gpu
    lost: bool = False
    utilization: float | None = None
    memory_activity: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperatures: Mapping[str, float] = field(default_factory=dict)
    clocks_hertz: Mapping[str, float] = field(default_factory=dict)
    activity: Mapping[str, float] = field(default_factory=dict)
    link_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    throttled: Mapping[str, bool] = field(default_factory=dict)
    ecc_errors: Mapping[str, int] = field(default_factory=dict)
    remapped_rows: Mapping[str, int] = field(default_factory=dict)
    xids: Mapping[int, int] = field(default_factory=dict)
    nvlink_bytes: Mapping[str, float] = field(default_factory=dict)
    link_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()


class GpuLibrary(Protocol):
    """A vendor's library. One thread at a time uses it."""

    vendor: str

    def read(self) -> list[GpuReading]:
        """All GPUs now.

        Raises:
            GpuLibraryMissing: There is no library or no driver.
            GpuLibraryFailed: It does not work.
        """
        ...

    def close(self) -> None:
        """Give back what the library holds."""
        ...
