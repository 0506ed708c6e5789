"""The exporter's view of a real NVIDIA GPU. Needs one, with its driver, and PyTorch to load it."""

import os
import time

import pytest

from carme_monitoring.gpus import GpuLibraryMissing, GpuReading, NvidiaLibrary

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def library():
    library = NvidiaLibrary()
    try:
        library.read()
    except GpuLibraryMissing as error:
        pytest.skip(f"There is no NVIDIA driver: {error}")
    yield library
    library.close()


def first(library: NvidiaLibrary) -> GpuReading:
    return next(reading for reading in library.read() if not reading.gpu.mig)


def work(seconds: float) -> None:
    """Keep the tensor cores busy."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()


def test_what_never_changes_is_known(library: NvidiaLibrary):
    gpu = first(library).gpu
    assert gpu.uuid.startswith("GPU-")
    assert torch.cuda.get_device_name(0) == gpu.model
    assert gpu.minor is not None


def test_memory_is_the_frameworks_memory(library: NvidiaLibrary):
    torch.zeros(1, device="cuda")
    before = first(library)
    block = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = first(library)
    grown = (after.memory_used_bytes or 0) - (before.memory_used_bytes or 0)
    assert abs(grown - block.numel()) < 256 << 20
    assert after.memory_total_bytes is not None and after.memory_total_bytes >= torch.cuda.mem_get_info()[1]
    del block
    torch.cuda.empty_cache()


def test_load_shows_in_every_figure(library: NvidiaLibrary):
    idle = first(library)
    work(1.0)
    first(library)  # the first sample of the counters
    work(2.0)
    busy = first(library)
    assert busy.utilization is not None and busy.utilization > 0.9
    assert busy.power_watts is not None and idle.power_watts is not None
    assert busy.power_watts > idle.power_watts
    assert busy.energy_joules is not None and idle.energy_joules is not None
    # Three seconds at no less than the idle power.
    assert busy.energy_joules - idle.energy_joules > 2.5 * min(idle.power_watts, busy.power_watts)
    assert 10 < busy.temperatures["gpu"] < 110
    assert busy.clocks_hertz["sm"] > 1e9
    assert set(busy.throttled) >= {"software_power_cap", "hardware_thermal"}
    if busy.activity:
        assert busy.activity["tensor"] > 0.3
        assert busy.activity["sm"] > 0.5
        assert busy.link_rates[("pcie", "transmit")] >= 0
        assert all(0 <= share <= 1.01 for share in busy.activity.values())


def test_this_process_is_seen_on_the_gpu(library: NvidiaLibrary):
    block = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    processes = first(library).processes
    own = next(process for process in processes if process.pid == os.getpid())
    assert own.memory_bytes is not None and own.memory_bytes >= block.numel()
