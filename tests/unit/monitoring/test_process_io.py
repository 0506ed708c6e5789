"""What jobs read and write under version 1, from `/proc/PID/io` by way of a file to the exporter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from carme_monitoring.jobs import Cgroups, ProcessIo, ProcessIoRecords, Usage
from carme_monitoring.jobs.cgroups import StepUsage
from patience import HANG

from .conftest import ROOT, Starts


@pytest.fixture
def processes(tmp_path: Path) -> Path:
    return tmp_path / "proc"


def counts(processes: Path, pid: int, read: int, written: int) -> None:
    (processes / str(pid)).mkdir(parents=True, exist_ok=True)
    (processes / f"{pid}/io").write_text(
        f"rchar: 9\nwchar: 9\nsyscr: 9\nsyscw: 9\nread_bytes: {read}\nwrite_bytes: {written}\n"
        "cancelled_write_bytes: 5\n"
    )


def moved_bytes(file: Path, job_id: int = 7) -> tuple[int | None, int | None]:
    usage = Usage(job_id)
    ProcessIoRecords(file).add_to([usage])
    return usage.read_bytes, usage.written_bytes


def test_a_job_has_what_all_its_steps_have_moved(processes: Path, tmp_path: Path):
    for pid in (101, 102, 103):
        counts(processes, pid, 10 * pid, pid)
    moved = ProcessIo(tmp_path / "jobs.json", processes)
    moved.update({7: {"batch": [101], "0": [102, 103]}, 8: {"batch": []}})
    usage = Usage(7, steps={"batch": StepUsage(), "0": StepUsage(), "1": StepUsage()})
    ProcessIoRecords(tmp_path / "jobs.json").add_to([usage])
    assert (usage.read_bytes, usage.written_bytes) == (3060, 306)
    assert (usage.steps["0"].read_bytes, usage.steps["0"].written_bytes) == (2050, 205)
    assert usage.steps["1"].read_bytes is None
    assert moved_bytes(tmp_path / "jobs.json", 8) == (0, 0)
    assert moved_bytes(tmp_path / "jobs.json", 9) == (None, None)


def test_what_has_ended_stays_counted_and_is_counted_once(processes: Path, tmp_path: Path):
    file = tmp_path / "jobs.json"
    moved = ProcessIo(file, processes)
    counts(processes, 101, 0, 0)
    counts(processes, 102, 500, 50)
    moved.update({7: {"batch": [101, 102]}})
    counts(processes, 101, 510, 51)  # it waited for the other, which had read a little more
    moved.update({7: {"batch": [101]}})
    assert moved_bytes(file) == (510, 51)
    counts(processes, 103, 40, 4)
    moved.update({7: {"batch": [101], "0": [103]}})
    assert moved_bytes(file) == (550, 55)
    moved.update({7: {"batch": [101]}})  # nobody waited: the step is over
    assert moved_bytes(file) == (550, 55)
    counts(processes, 101, 520, 51)
    moved.update({7: {"batch": [101]}})
    assert moved_bytes(file) == (560, 55)


def test_a_reader_that_was_restarted_goes_on_and_counts_nothing_twice(processes: Path, tmp_path: Path):
    file = tmp_path / "jobs.json"
    counts(processes, 101, 100, 10)
    counts(processes, 102, 900, 90)
    ProcessIo(file, processes).update({7: {"batch": [101, 102]}})
    moved = ProcessIo(file, processes)
    counts(processes, 101, 103, 10)
    moved.update({7: {"batch": [101]}})
    assert moved_bytes(file) == (1000, 100)
    counts(processes, 101, 105, 10)
    moved.update({7: {"batch": [101]}})
    assert moved_bytes(file) == (1002, 100)


def test_a_job_that_has_ended_is_dropped(processes: Path, tmp_path: Path):
    file = tmp_path / "jobs.json"
    counts(processes, 101, 100, 10)
    moved = ProcessIo(file, processes)
    moved.update({7: {"batch": [101]}})
    moved.update({})
    assert moved_bytes(file) == (None, None)
    counts(processes, 101, 30, 3)
    moved.update({7: {"batch": [101]}})  # its number is used again
    assert moved_bytes(file) == (30, 3)


@pytest.mark.parametrize(
    "text", ["", "{half", "[]", '{"7": 1}', '{"x": {}}', '{"7": {"0": [1]}}', '{"7": {"0": ["a", 1, 1, 1]}}']
)
def test_a_file_of_another_format_counts_as_missing(text: str, processes: Path, tmp_path: Path):
    file = tmp_path / "jobs.json"
    file.write_text(text)
    assert moved_bytes(file) in ((None, None), (0, 0))
    counts(processes, 101, 30, 3)
    ProcessIo(file, processes).update({7: {"0": [101]}})
    assert moved_bytes(file) == (30, 3)


def test_what_control_groups_report_counts_more(tmp_path: Path):
    (tmp_path / "jobs.json").write_text('{"7": {"0": [1, 2, 1, 2]}}')
    usage = Usage(7, read_bytes=0, written_bytes=9)
    ProcessIoRecords(tmp_path / "jobs.json").add_to([usage])
    assert (usage.read_bytes, usage.written_bytes) == (0, 9)


def test_io_of_a_step_reaches_the_exporter(start: Starts, tmp_path: Path):
    """With real processes: this one is in the job's step, and the reader may read what it moved."""
    step = tmp_path / "cgroup/freezer/slurm_n1/uid_0/job_7/step_0"
    (step / "task_0").mkdir(parents=True)
    (step / "cgroup.procs").write_text("")
    (tmp_path / "cgroup/memory/slurm_n1/uid_0/job_7/step_0").mkdir(parents=True)
    (step / "task_0/cgroup.procs").write_text(f"{os.getpid()}\n")
    groups = ["--cgroups", str(tmp_path / "cgroup")]
    assert Cgroups(tmp_path / "cgroup").processes_by_step() == {7: {"0": [os.getpid()]}}
    file = tmp_path / "io/jobs.json"
    reader = subprocess.Popen(
        [sys.executable, "-m", "carme_monitoring.node.io_reader", str(file), "--every", "0.1", *groups],
        env={"PYTHONPATH": f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stderr is not None
        assert "its folder is there" in reader.stderr.readline()
        file.parent.mkdir()
        while not file.exists():
            assert reader.poll() is None
        (found,) = json.loads(file.read_text())["7"].values()
        exporter = start(arguments=[*groups, "--io", str(file)])
        assert exporter.values("carme_job_io_read_bytes_total", jobid="7")[0] >= found[0]
        assert exporter.values("carme_step_io_written_bytes_total", jobid="7", step="0")[0] >= found[1]
    finally:
        reader.terminate()
        reader.communicate(timeout=HANG)


def test_the_reader_says_what_is_wrong_with_its_arguments(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "carme_monitoring.node.io_reader", str(tmp_path / "x"), "--every", "0"],
        env={"PYTHONPATH": f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "--every must be more than 0 seconds" in done.stderr
