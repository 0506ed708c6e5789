"""AMD's GPUs as a scrape shows them. AMD's own library is a simulated one."""

from __future__ import annotations

from pathlib import Path

import pytest

from carme_monitoring.gpus import AmdLibrary, GpuProcess

from .conftest import Exporter, Starts

GPU = "gpu uuid=amd-{n} util=50 used=1024 total=4096 power=300 energy=5000 temp=60{more}\n"


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    return tmp_path / "gpus.txt"


def describe(file: Path, *more: str) -> None:
    """One GPU for each text, which is added to its line."""
    new = file.with_suffix(".new")
    new.write_text("".join(GPU.format(n=n, more=f" {words}") for n, words in enumerate(more)))
    new.replace(file)


def state(exporter: Exporter, name: str) -> list[float]:
    return exporter.values("carme_gpu_library_state", vendor="amd", state=name)


def test_figures_have_the_names_and_units_of_all_gpus(start: Starts, gpus: Path):
    describe(gpus, "", "", "")
    exporter = start(amd=gpus)
    assert state(exporter, "ok") == [1]
    assert exporter.values("carme_gpu_library_state", vendor="nvidia", state="failed") == [0]
    found = {
        name: value for (name, labels), value in exporter.scrape().items() if ("uuid", "amd-2") in labels
    }
    assert found["carme_gpu_utilization_ratio"] == 0.5
    assert found["carme_gpu_memory_activity_ratio"] == 0.25
    assert found["carme_gpu_memory_used_bytes"] == 1 << 30
    assert found["carme_gpu_memory_total_bytes"] == 4 << 30
    assert found["carme_gpu_power_watts"] == 300
    assert found["carme_gpu_power_limit_watts"] == 750
    assert found["carme_gpu_energy_joules_total"] == pytest.approx(5000)
    assert exporter.values("carme_gpu_info", model="Simulated Instinct", minor="130", gpu="2") == [1]
    assert exporter.values("carme_gpu_temperature_celsius", uuid="amd-2", sensor="gpu") == [65]
    assert exporter.values("carme_gpu_temperature_celsius", uuid="amd-2", sensor="memory") == [70]
    assert exporter.values("carme_gpu_clock_hertz", uuid="amd-2", clock="sm") == [2.1e9]
    assert exporter.values("carme_gpu_ecc_errors_total", uuid="amd-2", kind="uncorrected") == [1]
    # What this library does not report in time has no series at all.
    assert exporter.values("carme_gpu_throttled") == []
    assert exporter.values("carme_gpu_link_bytes_per_second") == []


def test_an_older_gpu_reports_its_mean_power_and_no_energy(start: Starts, gpus: Path):
    describe(gpus, "old=1")
    exporter = start(amd=gpus)
    assert exporter.values("carme_gpu_power_watts") == [300]
    assert exporter.values("carme_gpu_energy_joules_total") == []
    assert exporter.values("carme_gpu_memory_activity_ratio") == []
    assert exporter.values("carme_gpu_temperature_celsius", sensor="gpu") == [60]


def test_a_lost_gpu_is_shown_as_lost_and_comes_back(start: Starts, gpus: Path):
    describe(gpus, "", "")
    exporter = start(amd=gpus, arguments=["--gpu-retry", "0"])
    assert exporter.values("carme_gpu_up") == [1, 1]
    describe(gpus, "", "lost=1")
    assert exporter.values("carme_gpu_up", uuid="amd-1") == [0]
    assert exporter.values("carme_gpu_utilization_ratio", uuid="amd-1") == []
    assert exporter.values("carme_gpu_up", uuid="amd-0") == [1]
    describe(gpus, "", "")
    assert exporter.values("carme_gpu_up") == [1, 1]


def test_a_gpu_that_does_not_answer_at_first_is_lost_until_it_does(start: Starts, gpus: Path):
    describe(gpus, "", "lost=1")
    exporter = start(amd=gpus, arguments=["--gpu-retry", "0"])
    for _ in range(2):
        assert exporter.values("carme_gpu_up", uuid="amd-0") == [1]
        assert exporter.values("carme_gpu_up", gpu="1") == [0]
    describe(gpus, "", "")
    assert exporter.values("carme_gpu_up") == [1, 1]
    assert exporter.values("carme_gpu_up", uuid="amd-1") == [1]


def test_a_gpu_that_the_exporter_may_not_use_is_not_lost(start: Starts, gpus: Path):
    describe(gpus, "", "denied=1")
    assert start(amd=gpus).values("carme_gpu_up") == [1]


def test_a_driver_that_is_not_loaded_or_fails_is_a_state(start: Starts, gpus: Path):
    gpus.write_text("fail=34\n")
    exporter = start(amd=gpus)
    assert state(exporter, "missing") == [1]
    gpus.write_text("fail=18\n")
    assert state(exporter, "failed") == [1]
    describe(gpus, "")
    assert state(exporter, "ok") == [1]
    assert exporter.values("carme_gpu_up") == [1]


def test_a_library_whose_layouts_are_others_is_not_read(start: Starts, gpus: Path):
    describe(gpus, "")
    gpus.write_text(gpus.read_text() + "version=24\n")
    exporter = start(amd=gpus)
    assert state(exporter, "failed") == [1]
    assert exporter.values("carme_gpu_up") == []


def test_a_library_that_hangs_holds_up_no_scrape(start: Starts, gpus: Path):
    describe(gpus, "hang=60000")
    exporter = start(amd=gpus, arguments=["--gpu-limit", "1"])
    assert state(exporter, "hanging") == [1]
    assert exporter.values("carme_gpu_library_state", vendor="nvidia", state="hanging") == [0]
    assert exporter.values("carme_exporter_pass_seconds")


def test_another_library_of_that_name_is_a_failure(
    gpus: Path, tmp_path: Path, start: Starts, monkeypatch: pytest.MonkeyPatch
):
    describe(gpus, "")
    (tmp_path / "rocm/lib").mkdir(parents=True)
    (tmp_path / "rocm/lib/libamd_smi.so").write_text("not a library")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    with pytest.raises(Exception, match="libamd_smi"):
        AmdLibrary(tmp_path, tmp_path, 0).read()


@pytest.mark.parametrize(("given", "job"), [("128", "7"), ("0", "7"), ("1", None)])
def test_a_job_has_the_gpu_that_slurm_gave_it_by_device_file_or_by_place(
    start: Starts, gpus: Path, tmp_path: Path, given: str, job: str | None
):
    describe(gpus, "")
    (tmp_path / "allocations").mkdir()
    (tmp_path / "allocations/7.json").write_text(f'{{"user": "ada", "gpus": "{given}"}}')
    folder = tmp_path / "cgroup/system.slice/slurmstepd.scope/job_7"
    folder.mkdir(parents=True)
    (tmp_path / "cgroup/cgroup.controllers").write_text("cpu memory\n")
    exporter = start(amd=gpus, arguments=["--cgroups", str(tmp_path / "cgroup")])
    values = exporter.values("carme_job_gpu_utilization_ratio", uuid="amd-0", jobid="7", user="ada")
    assert values == ([0.5] if job else [])


def test_processes_and_their_memory_are_the_kernel_s_word(
    library: Path, gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    describe(gpus, "", "")
    (tmp_path / "rocm").mkdir()
    (tmp_path / "rocm/lib").symlink_to(library)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setenv("SIMULATED_AMDSMI", str(gpus))
    for pid, name, text in (
        ("12", "vram_1001", "4096\n"),
        ("13", "vram_1001", ""),
        ("x", "vram_1000", "1\n"),
    ):
        (tmp_path / "kfd" / pid).mkdir(parents=True)
        (tmp_path / "kfd" / pid / name).write_text(text)
    driver = AmdLibrary(tmp_path, tmp_path / "kfd", 0)
    readings = driver.read()
    driver.close()
    assert [reading.processes for reading in readings] == [(), (GpuProcess(12, 4096),)]
