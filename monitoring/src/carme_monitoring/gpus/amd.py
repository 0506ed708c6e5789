"""AMD's GPUs, through its management library AMD SMI.

Names, units and layouts: AMD SMI C API reference. Its structures grow with each release; read here is only
what has lain at the same place since version 25 (ROCm 6.4), from buffers larger than any of them. What takes
the library a tenth of a second or more to find out (throttling, PCIe rates) is not requested.
Which process has which memory the kernel's compute driver shows everybody: linux, drivers/gpu/drm/amd/amdkfd.
"""

import ctypes
import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from carme_monitoring.gpus.known import KnownGpus
from carme_monitoring.gpus.reading import Gpu, GpuLibraryFailed, GpuLibraryMissing, GpuProcess, GpuReading

__all__ = ["AmdLibrary"]

_log = logging.getLogger("carme.monitoring")

OLDEST = 25  # major version of the library, of ROCm 6.4
_NAMES = (
    "libamd_smi.so",
    *(f"libamd_smi.so.{version}" for version in (27, 26, 25)),
    "/opt/rocm/lib/libamd_smi.so",
)
_ROOM = 8192  # bytes, more than any structure that is requested

_SUCCESS = 0
_NO_DRIVER = (34, 51)  # AMDSMI_STATUS_DRIVER_NOT_LOADED, AMDSMI_STATUS_NO_DRV
#: What a GPU answers that is there: it does not know such a thing, may not say it, or has no time.
_PRESENT = (2, 3, 8, 9, 10, 30, 40)
#: What one answers that is not for computing or for this account, and never reports its name.
_UNNAMED = (2, 3, 10, 40)
_INIT_GPUS = 1 << 1
_PROCESSOR_IS_GPU = 1
_VRAM = 0
_TEMPERATURES = {"edge": 0, "hotspot": 1, "memory": 2}
_CURRENT = 0
_CLOCKS = {"sm": 0, "memory": 4}  # the first runs what NVIDIA calls SMs
_UNKNOWN = (0xFFFF, 0xFFFFFFFF)  # "not reported", of fields of 16 and 32 bits


class _Failed(Exception):
    """The library answered with this error number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"AMD SMI answered with error {status}")
        self.status = status


class _GpuLost(Exception):
    """The GPU does not answer any more."""


class _Calls:
    """The library's functions, each with a buffer for its answer.

    Raises:
        GpuLibraryMissing: There is no such library.
        GpuLibraryFailed: It is another one.
    """

    def __init__(self) -> None:
        self._library = _loaded()
        self._room = ctypes.create_string_buffer(_ROOM)

    def call(self, name: str, *arguments: object) -> None:
        """Raises _Failed, and GpuLibraryFailed where there is no such function."""
        try:
            function = getattr(self._library, f"amdsmi_{name}")
        except AttributeError as error:
            raise GpuLibraryFailed(f"libamd_smi.so is not AMD SMI: {error}") from None
        if status := function(*arguments):
            raise _Failed(status)

    def answer(self, name: str, layout: str, *arguments: object) -> tuple[int, ...]:
        """The beginning of the structure that a function fills, by `struct`'s letters."""
        ctypes.memset(self._room, 0xFF, _ROOM)
        self.call(name, *arguments, self._room)
        return struct.unpack_from(f"={layout}", self._room)

    def text(self, name: str, *arguments: object) -> str:
        """The text with which that structure begins."""
        ctypes.memset(self._room, 0, _ROOM)
        self.call(name, *arguments, self._room)
        return self._room.value.decode("utf-8", "replace").strip()

    def handles(self, name: str, *arguments: object) -> list[ctypes.c_void_p]:
        """A list of handles, whose length is requested first."""
        count = ctypes.c_uint32(0)
        self.call(name, *arguments, ctypes.byref(count), None)
        found = (ctypes.c_void_p * count.value)()
        if count.value:
            self.call(name, *arguments, ctypes.byref(count), found)
        return [ctypes.c_void_p(value) for value in found[: count.value]]


def _loaded() -> ctypes.CDLL:
    folder = os.environ.get("ROCM_PATH")
    for name in (f"{folder}/lib/libamd_smi.so", *_NAMES) if folder else _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            message = str(error)
            # Found, and something that it needs is not there: looking on would hide the reason.
            if "No such file" not in message and "cannot open shared object" not in message:
                raise GpuLibraryFailed(message) from None
    raise GpuLibraryMissing("There is no libamd_smi.so.")


class _Device:
    """One GPU that the library knows, and what never changes about it."""

    def __init__(self, index: int, handle: ctypes.c_void_p, calls: _Calls) -> None:
        self.handle = handle
        length = ctypes.c_uint32(64)
        uuid = calls.text("get_gpu_device_uuid", handle, ctypes.byref(length))
        (minor,) = calls.answer("get_gpu_enumeration_info", "I", handle)
        (self.kernel_id,) = calls.answer("get_gpu_kfd_info", "Q", handle)
        self.gpu = Gpu(
            index=str(index),
            uuid=uuid,
            model=calls.text("get_gpu_asic_info", handle),
            minor=None if minor in _UNKNOWN else minor,
            place=index,
        )
        self.lost = False


class AmdLibrary:
    """The GPUs that AMD SMI shows.

    When the device files in `devices` change, or a GPU was lost, the library is initialised anew.

    Args:
        devices: The folder of device files of graphics cards.
        processes: Where the kernel's compute driver has a folder for each process that uses it.
        retry: Seconds between two looks for a GPU that was lost.
    """

    vendor = "amd"

    def __init__(
        self,
        devices: Path = Path("/dev/dri"),
        processes: Path = Path("/sys/class/kfd/kfd/proc"),
        retry: float = 60.0,
    ) -> None:
        self._folder, self._processes, self._retry = devices, processes, retry
        self._opened = 0.0
        self._calls: _Calls | None = None
        self._devices: list[_Device] | None = None
        self._files: frozenset[str] = frozenset()
        self._known = KnownGpus(self.vendor)

    def read(self) -> list[GpuReading]:
        """See `GpuLibrary.read`. A GPU that does not answer, or not any more, is in the list as lost."""
        files = frozenset(file.name for file in self._folder.glob("renderD*"))
        answering = {device.gpu.uuid for device in self._devices or () if not device.lost}
        due = time.monotonic() - self._opened >= self._retry
        if self._devices is None or files != self._files or (due and not self._known.is_complete(answering)):
            self._open()
            self._files = files
        assert self._calls is not None
        assert self._devices is not None
        processes = self._memory_of_processes()
        readings = [self._read(self._calls, device, processes) for device in self._devices]
        present = {reading.gpu.uuid for reading in readings}
        return readings + [GpuReading(gpu, lost=True) for gpu in self._known.missing(present)]

    def close(self) -> None:
        """See `GpuLibrary.close`."""
        if self._devices is not None and self._calls is not None:
            try:
                self._calls.call("shut_down")
            except (_Failed, GpuLibraryFailed) as error:
                _log.warning("AMD SMI cannot be closed: %s", error)
        self._devices = None

    def _open(self) -> None:
        self.close()
        self._opened = time.monotonic()
        if self._calls is None:
            self._calls = _Calls()
        calls = self._calls
        try:
            calls.call("init", ctypes.c_uint64(_INIT_GPUS))
        except _Failed as error:
            kind = GpuLibraryMissing if error.status in _NO_DRIVER else GpuLibraryFailed
            raise kind(str(error)) from None
        self._devices = []
        try:
            (version,) = calls.answer("get_lib_version", "I")
            if version < OLDEST:
                raise GpuLibraryFailed(
                    f"AMD SMI is of version {version}; version {OLDEST} (ROCm 6.4) or later is needed."
                )
            handles = list(_gpus(calls))
        except _Failed as error:
            self.close()
            raise GpuLibraryFailed(str(error)) from None
        except GpuLibraryFailed:
            self.close()
            raise
        self._known.begin()
        for index, handle in enumerate(handles):
            try:
                device = _Device(index, handle, calls)
            except _Failed as error:
                if error.status in _UNNAMED:
                    _log.warning("AMD GPU %d cannot be queried: %s", index, error)
                else:
                    self._known.add_silent(index, error)
                continue
            self._devices.append(device)
            self._known.add(device.gpu)

    def _read(self, calls: _Calls, device: _Device, processes: dict[int, list[GpuProcess]]) -> GpuReading:
        try:
            if device.lost:
                raise _GpuLost
            return _whole_gpu(calls, device, tuple(processes.get(device.kernel_id, ())))
        except _GpuLost:
            device.lost = True
            return GpuReading(device.gpu, lost=True)

    def _memory_of_processes(self) -> dict[int, list[GpuProcess]]:
        """The processes on each GPU, by the kernel's number of it: files `PID/vram_NUMBER`, in bytes."""
        found: dict[int, list[GpuProcess]] = {}
        for folder in _entries(self._processes):
            if not folder.name.isdecimal():
                continue
            for file in _entries(folder):
                number = file.name.removeprefix("vram_")
                if number != file.name and number.isdecimal():
                    try:
                        used = int(file.read_text(encoding="ascii"))
                    except (OSError, ValueError):  # the process has ended
                        continue
                    found.setdefault(int(number), []).append(GpuProcess(int(folder.name), used))
        return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _gpus(calls: _Calls) -> Iterator[ctypes.c_void_p]:
    for socket in calls.handles("get_socket_handles"):
        for handle in calls.handles("get_processor_handles", socket):
            (kind,) = calls.answer("get_processor_type", "I", handle)
            if kind == _PROCESSOR_IS_GPU:
                yield handle


def _whole_gpu(calls: _Calls, device: _Device, processes: tuple[GpuProcess, ...]) -> GpuReading:
    handle = device.handle

    def requested(name: str, layout: str, *arguments: object) -> tuple[int, ...] | None:
        """None where the GPU does not know such a thing."""
        try:
            return calls.answer(name, layout, handle, *arguments)
        except _Failed:
            return None

    try:  # every GPU knows its memory
        total = calls.answer("get_gpu_memory_total", "Q", handle, _VRAM)
    except _Failed as error:
        if error.status not in _PRESENT:
            raise _GpuLost from None
        total = None
    used = requested("get_gpu_memory_usage", "Q", _VRAM)
    engines = requested("get_gpu_activity", "II")
    power = requested("get_power_info", "8xII")
    limit = requested("get_power_cap_info", "Q", 0)
    ecc = requested("get_gpu_total_ecc_count", "QQ")
    sensors = {
        name: answer[0]
        for name, number in _TEMPERATURES.items()
        if (answer := requested("get_temp_metric", "q", number, _CURRENT)) and answer[0] >= 0
    }
    edge = sensors.pop("edge", None)
    if edge is None:  # GPUs for computing have no sensor there
        edge = sensors.get("hotspot")
    clocks = {
        name: answer[0]
        for name, number in _CLOCKS.items()
        if (answer := requested("get_clock_info", "I", number)) and answer[0] not in _UNKNOWN
    }
    return GpuReading(
        gpu=device.gpu,
        utilization=_share(engines[0]) if engines else None,
        memory_activity=_share(engines[1]) if engines else None,
        memory_used_bytes=used[0] if used else None,
        memory_total_bytes=total[0] if total else None,
        # Newer GPUs report what they draw now, older ones a mean.
        power_watts=next((float(watts) for watts in power or () if watts not in _UNKNOWN), None),
        power_limit_watts=limit[0] * 1e-6 if limit else None,
        energy_joules=_energy(calls, handle),
        temperatures={
            name: float(value) for name, value in {"gpu": edge, **sensors}.items() if value is not None
        },
        clocks_hertz={name: value * 1e6 for name, value in clocks.items()},
        ecc_errors={"corrected": ecc[0], "uncorrected": ecc[1]} if ecc else {},
        processes=processes,
    )


def _share(percent: int) -> float | None:
    return None if percent in _UNKNOWN else percent / 100


def _energy(calls: _Calls, handle: ctypes.c_void_p) -> float | None:
    """Joules: a count, and how many microjoules one of it is."""
    count, unit, taken = ctypes.c_uint64(0), ctypes.c_float(0), ctypes.c_uint64(0)
    try:
        calls.call("get_energy_count", handle, ctypes.byref(count), ctypes.byref(unit), ctypes.byref(taken))
    except _Failed:
        return None
    return count.value * unit.value * 1e-6
