"""What the GPUs of this node do, whichever make they are."""

from carme_monitoring.gpus.amd import AmdLibrary
from carme_monitoring.gpus.nvidia import NvidiaLibrary
from carme_monitoring.gpus.reading import (
    Gpu,
    GpuLibrary,
    GpuLibraryFailed,
    GpuLibraryMissing,
    GpuProcess,
    GpuReading,
    LibraryState,
)
from carme_monitoring.gpus.watch import GpuWatch

__all__ = [
    "AmdLibrary",
    "Gpu",
    "GpuLibrary",
    "GpuLibraryFailed",
    "GpuLibraryMissing",
    "GpuProcess",
    "GpuReading",
    "GpuWatch",
    "LibraryState",
    "NvidiaLibrary",
]
