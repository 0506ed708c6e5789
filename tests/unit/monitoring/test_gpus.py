"""GPUs as a scrape shows them. The driver's library is a simulated one, loaded by NVIDIA's own bindings."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Container
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from carme_monitoring.gpus import Gpu, GpuProcess, GpuReading, GpuWatch
from carme_monitoring.jobs import Allocations, Cgroups, Usage
from carme_monitoring.node.collector import NodeCollector
from carme_monitoring.serving import MetricsServer

from .conftest import ROOT, Starts
from .test_jobs import process, version_two

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


def test_errors_are_counted_by_kind_and_link(start: Starts, gpus: Path):
    describe(gpus, "ecc=17 ecc2=2", "nvlink=0")
    exporter = start(gpus)
    assert exporter.values("carme_gpu_ecc_errors_total", gpu="0", kind="corrected") == [17]
    assert exporter.values("carme_gpu_ecc_errors_total", gpu="0", kind="uncorrected") == [2]
    found = {
        (dict(labels)["gpu"], dict(labels)["link"], dict(labels)["kind"]): value
        for (name, labels), value in exporter.scrape().items()
        if name == "carme_gpu_link_errors_total"
    }
    # A GPU without NVLinks has no series of them.
    assert found == {
        ("0", "pcie", "replay"): 12,
        ("0", "nvlink", "crc"): 38,
        ("0", "nvlink", "replay"): 52,
        ("0", "nvlink", "recovery"): 59,
        ("1", "pcie", "replay"): 12,
    }
    assert exporter.values("carme_gpu_nvlink_bytes_total", gpu="1") == []


def test_reasons_for_lower_clocks_are_distinguished(start: Starts, gpus: Path):
    reasons = {
        0x4: "software_power_cap",
        0x8: "hardware_slowdown",
        0x10: "sync_boost",
        0x20: "software_thermal",
        0x40: "hardware_thermal",
        0x80: "hardware_power_brake",
        0x1: None,  # idle: nothing slows it down
    }
    describe(gpus, "")
    exporter = start(gpus)
    for bit, reason in reasons.items():
        describe(gpus, f"throttle={bit}")
        found = {
            dict(labels)["reason"]: value
            for (name, labels), value in exporter.scrape().items()
            if name == "carme_gpu_throttled"
        }
        assert len(found) == 6
        assert {name for name, value in found.items() if value} == ({reason} if reason else set())


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


def test_a_gpu_that_does_not_answer_at_first_is_lost_until_it_does(start: Starts, gpus: Path):
    """As after a reboot with a GPU that has failed, or a start while one is being reset."""
    describe(gpus, "", "lost=1")
    exporter = start(gpus, ["--gpu-retry", "0"])
    for _ in range(2):
        assert exporter.values("carme_gpu_up", uuid="GPU-0") == [1]
        assert exporter.values("carme_gpu_up", gpu="1") == [0]
        assert exporter.values("carme_gpu_utilization_ratio", gpu="1") == []
    describe(gpus, "", "")
    assert exporter.values("carme_gpu_up") == [1, 1]
    assert exporter.values("carme_gpu_up", uuid="GPU-1", gpu="1") == [1]
    # Lost again, it keeps its name, though the library cannot query it when it is initialised anew.
    describe(gpus, "", "lost=1")
    for _ in range(3):
        assert exporter.values("carme_gpu_up", gpu="1") == [0]
        assert exporter.values("carme_gpu_up", uuid="GPU-1") == [0]


def test_a_gpu_that_the_exporter_may_not_use_is_not_lost(start: Starts, gpus: Path):
    describe(gpus, "", "denied=1")
    assert start(gpus).values("carme_gpu_up") == [1]


def test_driver_errors_are_counted_by_number(start: Starts, gpus: Path):
    describe(gpus, "")
    exporter = start(gpus)
    assert exporter.values("carme_gpu_xid_errors_total") == []
    describe(gpus, "xid=79")
    assert exporter.values("carme_gpu_xid_errors_total", xid="79") == [1]
    describe(gpus, "")
    assert exporter.values("carme_gpu_xid_errors_total", xid="79") == [1]


def test_the_error_with_which_a_gpu_was_lost_is_counted(start: Starts, gpus: Path):
    describe(gpus, "", "")
    exporter = start(gpus)
    assert exporter.values("carme_gpu_up") == [1, 1]
    describe(gpus, "", "lost=1 xid=79")
    assert exporter.values("carme_gpu_up", uuid="GPU-1") == [0]
    assert exporter.values("carme_gpu_xid_errors_total", xid="79", uuid="GPU-1") == [1]
    assert exporter.values("carme_gpu_xid_errors_total", uuid="GPU-0") == []


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
    describe(gpus, "hang=3000")
    exporter = start(gpus, ["--gpu-limit", "0.3"])
    assert exporter.values("carme_gpu_library_state", vendor="nvidia", state="hanging") == [1]
    assert exporter.values("carme_gpu_up") == []
    # Jobs are still reported, and the GPU is back as soon as the library answers.
    assert exporter.values("carme_exporter_pass_seconds")
    describe(gpus, "")
    while exporter.values("carme_gpu_up") != [1]:
        time.sleep(0.02)


def test_gpu_memory_is_reported_for_processes_of_jobs_alone(tmp_path: Path):
    """The largest few of a GPU, each under the job that it belongs to."""
    processes = tuple(GpuProcess(pid, pid * 10) for pid in range(100, 120))
    reading = GpuReading(Gpu("0", "GPU-0", minor=0), memory_used_bytes=9, processes=processes)
    for pid in range(100, 120):
        group = "/system.slice/slurmstepd.scope/job_7/step_0" if pid % 2 else "/system.slice/ssh.service"
        process(tmp_path / "proc", pid, "python", group)
    version_two(tmp_path / "cgroup")
    (tmp_path / "allocations").mkdir()
    (tmp_path / "allocations/7.json").write_text('{"user": "ada", "account": "research", "gpus": "0"}')
    registry = CollectorRegistry()
    cgroups = Cgroups(tmp_path / "cgroup", tmp_path / "proc")
    registry.register(
        NodeCollector(GpuWatch([Shown(reading)]), cgroups, Allocations(tmp_path / "allocations"))
    )
    found = {
        sample.labels["pid"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "carme_job_gpu_process_memory_used_bytes"
    }
    assert found == {str(pid): pid * 10 for pid in (113, 115, 117, 119)}
    assert registry.get_sample_value("carme_gpu_foreign_processes", {"gpu": "0", "uuid": "GPU-0"}) == 10


class Shown:
    """A library that shows one GPU, and counts how often it is called."""

    vendor = "nvidia"

    def __init__(self, reading: GpuReading) -> None:
        self._reading, self.reads = reading, 0

    def read(self) -> list[GpuReading]:
        self.reads += 1
        return [self._reading]

    def close(self) -> None:
        pass


PLUGGED = """
import sys
from pathlib import Path
from carme_monitoring.gpus import NvidiaLibrary
library = NvidiaLibrary(Path(sys.argv[1]), retry=3600)
for _ in sys.stdin:
    print(*(f"{reading.gpu.uuid}{'-' if reading.lost else '+'}" for reading in library.read()), flush=True)
"""


def test_a_gpu_that_is_plugged_in_is_seen_and_one_that_is_taken_out_is_lost(
    library: Path, gpus: Path, tmp_path: Path
):
    """The driver makes a device file for each GPU; the library itself lists what there was at its start."""
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidia0").touch()
    describe(gpus, "")
    environment = os.environ | {"LD_LIBRARY_PATH": str(library), "SIMULATED_NVML": str(gpus)}
    environment["PYTHONPATH"] = f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}"
    words = [sys.executable, "-c", PLUGGED, str(devices)]
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def sample() -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert sample() == "GPU-0+"
        describe(gpus, "", "")
        (devices / "nvidia1").touch()
        assert sample() == "GPU-0+ GPU-1+"
        describe(gpus, "")
        (devices / "nvidia1").unlink()
        assert sample() == "GPU-0+ GPU-1-"
        process.stdin.close()


class Counted(Cgroups):
    """Control groups that count how often they are read."""

    passes = 0

    def usage(self, owned: Container[int] = ()) -> list[Usage]:
        self.passes += 1
        return super().usage(owned)


def test_one_scrape_is_one_pass(tmp_path: Path):
    library = Shown(GpuReading(Gpu("0", "GPU-0", minor=0), utilization=0.5))
    cgroups = Counted(tmp_path / "cgroup", tmp_path / "proc")
    registry = CollectorRegistry()
    registry.register(NodeCollector(GpuWatch([library]), cgroups, Allocations(tmp_path / "allocations")))
    server = MetricsServer("127.0.0.1:0", registry, None)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        assert (library.reads, cgroups.passes) == (0, 0)  # nor does its start cost one
        for number in (1, 2, 3):
            answer = httpx.get(f"http://127.0.0.1:{server.server_port}/metrics", trust_env=False)
            assert "carme_gpu_utilization_ratio" in answer.text
            assert (library.reads, cgroups.passes) == (number, number)
    finally:
        server.shutdown()
        server.server_close()
