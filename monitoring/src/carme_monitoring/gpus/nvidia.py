"""NVIDIA's GPUs, through its management library NVML.

Names and units: NVML API Reference Manual. GPM, the counters of Hopper and later GPUs that need no profiler,
is described there under "GPU Performance Monitoring".
"""

import contextlib
import ctypes
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from carme_monitoring.gpus.known import KnownGpus
from carme_monitoring.gpus.reading import Gpu, GpuLibraryFailed, GpuLibraryMissing, GpuProcess, GpuReading

__all__ = ["NvidiaLibrary"]

T = TypeVar("T")

# The bindings carry no types, and what can be guessed of them is wrong.
nvml: Any = pynvml

_log = logging.getLogger("carme.monitoring")

_ABSENT = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
_GONE = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)

_FIELDS = {
    "memory_temperature": nvml.NVML_FI_DEV_MEMORY_TEMP,
    "nvlink_transmit": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    "nvlink_receive": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
}
_LINK_ERRORS = {
    ("pcie", "replay"): nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,
    ("nvlink", "crc"): nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    ("nvlink", "replay"): nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    ("nvlink", "recovery"): nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
}
_ALL_LINKS = 0xFFFFFFFF  # scope of the NVLink fields: the sum over the GPU's links

#: Shares that GPM measures, in per cent there.
_ACTIVITY = {
    "sm": nvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy": nvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "fp64": nvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32": nvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16": nvml.NVML_GPM_METRIC_FP16_UTIL,
}
#: Rates that GPM measures, in MiB/s there. NVML's own PCIe counters have 32 bits, which a busy GPU fills in
#: less than a second, and its PCIe rates take 20 ms for each question.
_RATES = {
    ("pcie", "transmit"): nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    ("pcie", "receive"): nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    ("nvlink", "transmit"): nvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    ("nvlink", "receive"): nvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}

_THROTTLES = {
    "software_power_cap": nvml.nvmlClocksThrottleReasonSwPowerCap,
    "hardware_slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
    "software_thermal": nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hardware_thermal": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hardware_power_brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    "sync_boost": nvml.nvmlClocksThrottleReasonSyncBoost,
}


class _GpuLost(Exception):
    """The GPU fell off the bus."""


def _query(question: Callable[..., T], *arguments: Any) -> T | None:
    """The answer, None where the GPU does not know such a thing. Raises _GpuLost."""
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        if error.value in _GONE:
            raise _GpuLost(str(error)) from None
        return None


class _Activity:
    """The GPM counters of one GPU: its figures come from two samples, so the first look has none."""

    def __init__(self, handle: Any, instance: int | None = None) -> None:
        self._handle, self._instance = handle, instance
        self._before: Any = None

    def read(self) -> dict[int, float]:
        """Values by the number of the metric."""
        wanted = (*_ACTIVITY.values(), *_RATES.values())
        sample = nvml.nvmlGpmSampleAlloc()
        try:
            if self._instance is None:
                nvml.nvmlGpmSampleGet(self._handle, sample)
            else:
                nvml.nvmlGpmMigSampleGet(self._handle, self._instance, sample)
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            raise
        before, self._before = self._before, sample
        if before is None:
            return {}
        try:
            question = nvml.c_nvmlGpmMetricsGet_t()
            question.version = nvml.NVML_GPM_METRICS_GET_VERSION
            question.numMetrics = len(wanted)
            question.sample1, question.sample2 = before, sample
            for place, number in enumerate(wanted):
                question.metrics[place].metricId = number
            nvml.nvmlGpmMetricsGet(question)
        finally:
            nvml.nvmlGpmSampleFree(before)
        answers = [question.metrics[place] for place in range(len(wanted))]
        return {
            answer.metricId: answer.value
            for answer in answers
            # An idle GPU divides nothing by nothing for some of them.
            if answer.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(answer.value)
        }

    def close(self) -> None:
        if self._before is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlGpmSampleFree(self._before)
            self._before = None


class _Device:
    """One GPU that the library knows, and what never changes about it."""

    def __init__(self, index: int, handle: Any) -> None:
        self.handle = handle
        self.gpu = Gpu(
            index=str(index),
            uuid=nvml.nvmlDeviceGetUUID(handle),
            model=_query(nvml.nvmlDeviceGetName, handle) or "",
            minor=_query(nvml.nvmlDeviceGetMinorNumber, handle),
        )
        self.measures_itself = _measures_itself(handle)
        self.activities: dict[str, _Activity] = {}
        self.lost = False

    def measured(self, name: str, instance: int | None = None) -> dict[int, float]:
        """The GPM counters of the whole GPU (name "") or of a MIG instance."""
        if not self.measures_itself:
            return {}
        if name not in self.activities:
            self.activities[name] = _Activity(self.handle, instance)
        try:
            return self.activities[name].read()
        except nvml.NVMLError:
            return {}

    def close(self) -> None:
        for activity in self.activities.values():
            activity.close()


def _measures_itself(handle: Any) -> bool:
    support = _query(nvml.nvmlGpmQueryDeviceSupport, handle)
    return bool(support and support.isSupportedDevice)


class NvidiaLibrary:
    """The GPUs that NVML shows.

    NVML lists the GPUs that it found when it was initialised: when the device files in `devices` change, or a
    GPU was lost, it is initialised anew.

    Args:
        devices: The folder of device files.
        retry: Seconds between two looks for a GPU that was lost.
    """

    vendor = "nvidia"

    def __init__(self, devices: Path = Path("/dev"), retry: float = 60.0) -> None:
        self._folder, self._retry = devices, retry
        self._opened = 0.0
        self._devices: list[_Device] | None = None
        self._files: frozenset[str] = frozenset()
        self._events: Any = None
        self._xids: dict[str, Counter[int]] = {}
        self._known = KnownGpus(self.vendor)

    def read(self) -> list[GpuReading]:
        """See `GpuLibrary.read`. A GPU that does not answer, or not any more, is in the list as lost."""
        files = frozenset(file.name for file in self._folder.glob("nvidia[0-9]*"))
        answering = {device.gpu.uuid for device in self._devices or () if not device.lost}
        due = time.monotonic() - self._opened >= self._retry
        if self._devices is None or files != self._files or (due and not self._known.is_complete(answering)):
            self._open()
            self._files = files
        assert self._devices is not None
        self._take_events()
        readings = [reading for device in self._devices for reading in self._read(device)]
        present = {reading.gpu.uuid for reading in readings}
        return readings + [
            GpuReading(gpu, lost=True, xids=dict(self._xids.get(gpu.uuid, {})))
            for gpu in self._known.missing(present)
        ]

    def close(self) -> None:
        """See `GpuLibrary.close`."""
        if self._devices is None:
            return
        for device in self._devices:
            device.close()
        if self._events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        self._devices = self._events = None

    def _open(self) -> None:
        self.close()
        self._opened = time.monotonic()
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            kind = GpuLibraryMissing if error.value in _ABSENT else GpuLibraryFailed
            raise kind(str(error)) from None
        except AttributeError as error:
            raise GpuLibraryFailed(f"libnvidia-ml.so.1 is not NVML: {error}") from None
        self._devices = []
        self._known.begin()
        for index in range(count):
            try:
                device = _Device(index, nvml.nvmlDeviceGetHandleByIndex(index))
            except (nvml.NVMLError, _GpuLost) as error:
                if getattr(error, "value", None) == nvml.NVML_ERROR_NO_PERMISSION:
                    _log.warning("GPU %d may not be queried by this account: %s", index, error)
                else:
                    self._known.add_silent(index, error)
                continue
            self._devices.append(device)
            self._known.add(device.gpu)
        self._listen()

    def _listen(self) -> None:
        """Ask for the driver's error reports (XIDs); not every GPU gives them."""
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            self._events = None
            return
        for device in self._devices or ():
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(device.handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _take_events(self) -> None:
        if self._events is None:
            return
        for _ in range(1000):  # a GPU that reports without end must not hold up the look
            try:
                event = nvml.nvmlEventSetWait(self._events, 0)
            except nvml.NVMLError:  # a time-out: there are no more
                return
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                # Not by asking the GPU for its name: one that has just been lost says that, and nothing more.
                where = _address(event.device)
                for device in self._devices or ():
                    if _address(device.handle) == where:
                        self._xids.setdefault(device.gpu.uuid, Counter())[int(event.eventData)] += 1

    def _read(self, device: _Device) -> Iterator[GpuReading]:
        try:
            if device.lost:
                raise _GpuLost
            whole = self._whole_gpu(device)
            instances = list(self._instances(device))
        except _GpuLost:
            device.lost = True
            yield GpuReading(device.gpu, lost=True, xids=dict(self._xids.get(device.gpu.uuid, {})))
            return
        yield whole
        yield from instances

    def _whole_gpu(self, device: _Device) -> GpuReading:
        handle = device.handle
        rates = _query(nvml.nvmlDeviceGetUtilizationRates, handle)
        measured = device.measured("")
        memory = _query(nvml.nvmlDeviceGetMemoryInfo, handle)
        fields = _fields(handle)
        temperature = _query(nvml.nvmlDeviceGetTemperatureV, handle, nvml.NVML_TEMPERATURE_GPU)
        throttles = _query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        temperatures = {"gpu": temperature, "memory": fields.get("memory_temperature")}
        clocks = {
            "sm": _query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory": _query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        }
        return GpuReading(
            gpu=device.gpu,
            utilization=rates.gpu / 100 if rates else None,
            memory_activity=rates.memory / 100 if rates else None,
            memory_used_bytes=int(memory.used) if memory else None,
            memory_total_bytes=int(memory.total) if memory else None,
            power_watts=_scaled(_query(nvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
            power_limit_watts=_scaled(_query(nvml.nvmlDeviceGetPowerManagementLimit, handle), 1e-3),
            energy_joules=_scaled(_query(nvml.nvmlDeviceGetTotalEnergyConsumption, handle), 1e-3),
            temperatures={name: float(value) for name, value in temperatures.items() if value is not None},
            clocks_hertz={name: value * 1e6 for name, value in clocks.items() if value is not None},
            activity=_activity(measured),
            link_rates={
                link: measured[number] * (1 << 20) for link, number in _RATES.items() if number in measured
            },
            throttled={name: bool(throttles & bit) for name, bit in _THROTTLES.items()}
            if throttles is not None
            else {},
            ecc_errors=_ecc(handle),
            remapped_rows=_remapped_rows(handle),
            xids=dict(self._xids.get(device.gpu.uuid, {})),
            nvlink_bytes={
                name: fields[f"nvlink_{name}"] * 1024
                for name in ("receive", "transmit")
                if f"nvlink_{name}" in fields
            },
            link_errors={which: int(fields[which]) for which in _LINK_ERRORS if which in fields},
            processes=_processes(handle),
        )

    def _instances(self, device: _Device) -> Iterator[GpuReading]:
        """The MIG instances of a GPU that is divided."""
        mode = _query(nvml.nvmlDeviceGetMigMode, device.handle)
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for place in range(_query(nvml.nvmlDeviceGetMaxMigDeviceCount, device.handle) or 0):
            handle = _query(nvml.nvmlDeviceGetMigDeviceHandleByIndex, device.handle, place)
            if handle is None:
                continue
            instance = _query(nvml.nvmlDeviceGetGpuInstanceId, handle)
            name = f"{instance}.{_query(nvml.nvmlDeviceGetComputeInstanceId, handle)}"
            memory = _query(nvml.nvmlDeviceGetMemoryInfo, handle)
            yield GpuReading(
                gpu=Gpu(
                    index=device.gpu.index,
                    uuid=_query(nvml.nvmlDeviceGetUUID, handle) or f"{device.gpu.uuid}/{name}",
                    model=_query(nvml.nvmlDeviceGetName, handle) or device.gpu.model,
                    minor=device.gpu.minor,
                    mig=name,
                ),
                memory_used_bytes=int(memory.used) if memory else None,
                memory_total_bytes=int(memory.total) if memory else None,
                activity=_activity(device.measured(name, instance)),
                processes=_processes(handle),
            )


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _fields(handle: Any) -> dict[Any, float]:
    """Values that are requested by number, all in one call: those of _FIELDS and _LINK_ERRORS."""
    wanted = [
        (number, _ALL_LINKS) if name.startswith("nvlink") else number for name, number in _FIELDS.items()
    ]
    answers = _query(nvml.nvmlDeviceGetFieldValues, handle, [*wanted, *_LINK_ERRORS.values()])
    found: dict[Any, float] = {}
    for name, answer in zip((*_FIELDS, *_LINK_ERRORS), answers or (), strict=False):
        if answer.nvmlReturn == nvml.NVML_SUCCESS:
            found[name] = _value(answer)
    return found


def _value(answer: Any) -> float:
    match answer.valueType:
        case nvml.NVML_VALUE_TYPE_DOUBLE:
            return answer.value.dVal
        case nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            return answer.value.uiVal
        case nvml.NVML_VALUE_TYPE_UNSIGNED_LONG:
            return answer.value.ulVal
        case nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG:
            return answer.value.sllVal
        case _:
            return ctypes.c_ulonglong(answer.value.ullVal).value


def _activity(measured: dict[int, float]) -> dict[str, float]:
    return {unit: measured[number] / 100 for unit, number in _ACTIVITY.items() if number in measured}


def _ecc(handle: Any) -> dict[str, int]:
    kinds = {
        "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    counts = {
        name: _query(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)
        for name, kind in kinds.items()
    }
    return {name: count for name, count in counts.items() if count is not None}


def _remapped_rows(handle: Any) -> dict[str, int]:
    rows = _query(nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is None:
        return {}
    corrected, uncorrected, pending, failure = rows
    return {
        "corrected": corrected,
        "uncorrected": uncorrected,
        "pending": int(bool(pending)),
        "failed": int(bool(failure)),
    }


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    found = {}
    for question in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        for process in _query(question, handle) or ():
            used = process.usedGpuMemory
            found[process.pid] = GpuProcess(process.pid, int(used) if used is not None else None)
    return tuple(found.values())
