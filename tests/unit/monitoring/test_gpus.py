"""GPUs as a scrape shows them. The driver's library is a simulated one, loaded by NVIDIA's own bindings."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Starts

GPU = (
    "gpu uuid=GPU-{n} minor={n} util=50 used=1024 total=4096 power=300 energy=5000 temp=60 tensor=40{more}\n"
)


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    return tmp_path / "gpus.txt"


def describe(file: Path, *more: str) -> None:
    """One GPU for each text, which is added to its line."""
    new = file.with_suffix(".new")
    new.write_text("".join(GPU.format(n=n, more=f" {words}") for n, words in enumerate(more)))
    new.replace(file)


def test_a_node_without_gpus_says_so(start: Starts):
    exporter = start()
    assert exporter.values("carme_gpu_library_state", state="missing") == [1, 1]
    assert exporter.values("carme_gpu_up") == []


def test_figures_are_in_base_units(start: Starts, gpus: Path):
    describe(gpus, "")
    exporter = start(gpus)
    exporter.scrape()  # GPM's figures come from two samples
    found = {
        name: value for (name, labels), value in exporter.scrape().items() if ("uuid", "GPU-0") in labels
    }
    assert found["carme_gpu_utilization_ratio"] == 0.5
    assert found["carme_gpu_memory_used_bytes"] == 1 << 30
    assert found["carme_gpu_memory_total_bytes"] == 4 << 30
    assert found["carme_gpu_power_watts"] == 300
    assert found["carme_gpu_energy_joules_total"] == 5000
    assert exporter.values("carme_gpu_temperature_celsius", sensor="memory") == [65]
    assert exporter.values("carme_gpu_clock_hertz", clock="sm") == [1.98e9]
    assert exporter.values("carme_gpu_activity_ratio", unit="tensor") == [0.4]
    assert exporter.values("carme_gpu_link_bytes_per_second", link="pcie", direction="transmit") == [10 << 20]
    assert exporter.values("carme_gpu_nvlink_bytes_total", direction="receive") == [1 << 20]
    assert exporter.values("carme_gpu_ecc_errors_total", kind="uncorrected") == [1]
    assert exporter.values("carme_gpu_remapped_rows", kind="pending") == [1]
    assert exporter.values("carme_gpu_throttled", reason="hardware_thermal") == [0]


def test_heat_shows_as_a_reason_for_lower_clocks(start: Starts, gpus: Path):
    describe(gpus, "")
    gpus.write_text(gpus.read_text().replace("temp=60", "temp=95"))
    assert start(gpus).values("carme_gpu_throttled", reason="hardware_thermal") == [1]


def test_an_idle_gpu_has_no_made_up_figures(start: Starts, gpus: Path):
    describe(gpus, "")
    gpus.write_text(gpus.read_text().replace("util=50", "util=0"))
    exporter = start(gpus)
    exporter.scrape()
    # The library answers "not a number" for the memory's share when nothing ran.
    assert exporter.values("carme_gpu_activity_ratio", unit="dram") == []
    assert exporter.values("carme_gpu_activity_ratio", unit="sm") == [0]


def test_a_lost_gpu_is_shown_as_lost_and_comes_back(start: Starts, gpus: Path):
    describe(gpus, "", "")
    exporter = start(gpus, ["--gpu-retry", "0"])
    assert exporter.values("carme_gpu_up") == [1, 1]
    describe(gpus, "", "lost=1")
    assert exporter.values("carme_gpu_up", uuid="GPU-1") == [0]
    assert exporter.values("carme_gpu_utilization_ratio", uuid="GPU-1") == []
    assert exporter.values("carme_gpu_up", uuid="GPU-0") == [1]
    describe(gpus, "", "")
    assert exporter.values("carme_gpu_up") == [1, 1]


def test_driver_errors_are_counted_by_number(start: Starts, gpus: Path):
    describe(gpus, "")
    exporter = start(gpus)
    assert exporter.values("carme_gpu_xid_errors_total") == []
    describe(gpus, "xid=79")
    assert exporter.values("carme_gpu_xid_errors_total", xid="79") == [1]
    describe(gpus, "")
    assert exporter.values("carme_gpu_xid_errors_total", xid="79") == [1]


def test_instances_of_a_divided_gpu_have_their_own_series(start: Starts, gpus: Path):
    describe(gpus, "mig=2")
    exporter = start(gpus)
    exporter.scrape()
    assert exporter.values("carme_gpu_memory_total_bytes", gpu="0:1.0") == [2 << 30]
    assert exporter.values("carme_gpu_memory_total_bytes", gpu="0:2.0") == [2 << 30]
    assert exporter.values("carme_gpu_activity_ratio", gpu="0:2.0", unit="tensor") == [0.4]


def test_a_driver_that_fails_is_a_state(start: Starts, gpus: Path):
    gpus.write_text("fail=999\n")
    exporter = start(gpus)
    assert exporter.values("carme_gpu_library_state", vendor="nvidia", state="failed") == [1]
    describe(gpus, "")
    assert exporter.values("carme_gpu_library_state", vendor="nvidia", state="ok") == [1]
    assert exporter.values("carme_gpu_up") == [1]


def test_a_library_that_hangs_holds_up_no_scrape(start: Starts, gpus: Path):
    describe(gpus, "hang=1500")
    exporter = start(gpus, ["--gpu-limit", "0.3"])
    assert exporter.values("carme_gpu_library_state", vendor="nvidia", state="hanging") == [1]
    assert exporter.values("carme_gpu_up") == []
    # Jobs are still told, and the GPU is back as soon as the library answers.
    assert exporter.values("carme_exporter_pass_seconds")
    describe(gpus, "")
    for _ in range(100):
        if exporter.values("carme_gpu_library_state", vendor="nvidia", state="ok") == [1]:
            break
    assert exporter.values("carme_gpu_up") == [1]
