"""Jobs as a scrape shows them, from trees of files as the kernel and Slurm make them."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from carme_monitoring.exposition import text
from carme_monitoring.gpus import GpuWatch
from carme_monitoring.jobs import Allocations, Cgroups, StepUsage
from carme_monitoring.node.collector import NodeCollector


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def version_two(root: Path, name: str = "job_7", scope: str = "slurmstepd.scope") -> Path:
    write(root, cgroup__controllers="cpu memory io pids\n")
    job = root / "system.slice" / scope / name
    write(
        job,
        cpu__stat="usage_usec 3500000\nuser_usec 3000000\nsystem_usec 500000\n",
        memory__current="104857600\n",
        memory__peak="209715200\n",
        memory__max="524288000\n",
        memory__stat="anon 94371840\ninactive_file 4857600\n",
        memory__events="low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n",
        io__stat="8:0 rbytes=100 wbytes=20 rios=1 dios=0\n8:16 rbytes=1 wbytes=2 wios=1\n",
        cgroup__procs="",
    )
    for step, pid in (("step_batch", "101"), ("step_0", "102")):
        write(
            job / step,
            cpu__stat="usage_usec 1000000\n",
            memory__current="50\n",
            memory__stat="inactive_file 10\n",
        )
        write(job / step / "slurm", cgroup__procs="100\n", cgroup__threads="100\n103\n104\n")
        write(job / step / "user", cgroup__procs="", cgroup__threads="")
        task = job / step / "user/task_0"
        write(task, cgroup__procs=f"{pid}\n", cgroup__threads=f"{pid}\n" + 5 * "900\n")
    write(root / "system.slice" / scope / "system", cgroup__procs="1\n")
    return job


def process(folder: Path, pid: int, title: str, group: str) -> None:
    write(folder / str(pid), cgroup=f"0::{group}\n")
    (folder / str(pid) / "cmdline").write_bytes(title.encode() + b"\0")


def test_use_is_read_from_cgroup_version_two(root: Path, tmp_path: Path):
    version_two(root)
    (usage,) = Cgroups(root, tmp_path / "proc").usage()
    assert usage.job_id == 7
    assert usage.cpu_user_seconds == pytest.approx(3.0)
    assert usage.cpu_system_seconds == pytest.approx(0.5)
    assert usage.memory_bytes == 100_000_000
    assert usage.memory_peak_bytes == 209_715_200
    assert usage.memory_limit_bytes == 524_288_000
    assert usage.oom_kills == 2
    assert (usage.read_bytes, usage.written_bytes) == (101, 22)
    assert usage.threads == 12
    assert usage.steps.keys() == {"batch", "0"}
    assert usage.steps["0"].memory_bytes == 40
    assert usage.steps["0"].threads == 6


def test_io_that_is_counted_begins_with_nothing(root: Path, tmp_path: Path):
    write(version_two(root), io__stat="")
    (usage,) = Cgroups(root, tmp_path / "proc").usage()
    assert (usage.read_bytes, usage.written_bytes) == (0, 0)
    assert (usage.steps["0"].read_bytes, usage.steps["0"].written_bytes) == (None, None)


@pytest.mark.parametrize("made_first", [True, False])
def test_the_group_that_the_prolog_made_does_not_hide_the_job_s_own(
    root: Path, tmp_path: Path, made_first: bool
):
    def own() -> None:
        write(version_two(root, name="s4CJ2X0QF0000"), cgroup__events="populated 1\n")

    def empty() -> None:
        write(root / "system.slice/slurmstepd.scope/job_7", cgroup__events="populated 0\nfrozen 0\n")

    for make in (empty, own) if made_first else (own, empty):
        make()
    process(tmp_path / "proc", 100, "slurmstepd: [7.batch]", "/x")
    assert [usage.threads for usage in Cgroups(root, tmp_path / "proc").usage(owned={7})] == [12]


def test_io_of_a_job_named_by_its_run_is_read_for_each_step(root: Path, tmp_path: Path):
    """The layout of Slurm 26.05: groups are named by SLUIDs, beside the one that the prolog made first."""
    job = version_two(root, name="sEKNKTV3WPV500")
    write(job, cgroup__events="populated 1\n")
    write(job / "step_0", io__stat="8:0 rbytes=7 wbytes=9\n")
    write(root / "system.slice/slurmstepd.scope/job_7", cgroup__events="populated 0\n", io__stat="")
    process(tmp_path / "proc", 100, "slurmstepd: [7.0]", "/x")
    (usage,) = Cgroups(root, tmp_path / "proc").usage()
    assert (usage.job_id, usage.read_bytes, usage.written_bytes) == (7, 101, 22)
    assert (usage.memory_bytes, usage.cpu_user_seconds) == (100_000_000, pytest.approx(3.0))
    assert (usage.steps["0"].read_bytes, usage.steps["0"].written_bytes) == (7, 9)


def test_version_two_with_a_scope_for_each_slurmd_is_read(root: Path, tmp_path: Path):
    version_two(root, scope="n1_slurmstepd.scope")
    assert [usage.job_id for usage in Cgroups(root, tmp_path / "proc").usage()] == [7]


@pytest.mark.parametrize(
    "title", ["[7.batch]", "[7.0]", "[7.extern stepmgr]", "[7.0+1]", "[7.interactive]"]
)  # as 22.05 to 26.05 write them
def test_a_folder_with_another_name_is_known_by_its_slurmstepd(root: Path, tmp_path: Path, title: str):
    version_two(root, name="s4CJ2X0QF0000")
    processes = tmp_path / "proc"
    process(processes, 100, f"slurmstepd: {title}", "/x")
    process(
        processes,
        101,
        "python train.py",
        "/system.slice/slurmstepd.scope/s4CJ2X0QF0000/step_batch/user/task_0",
    )
    cgroups = Cgroups(root, processes)
    assert [usage.job_id for usage in cgroups.usage()] == [7]
    assert cgroups.job_of(101) == 7


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(number.readlink()))
    return found


def test_files_that_stay_open_report_what_is_new_and_close_with_the_job(root: Path, tmp_path: Path):
    job = version_two(root)
    cgroups = Cgroups(root, tmp_path / "proc")
    assert [usage.threads for usage in cgroups.usage()] == [12]
    threads = job / "step_0/user/task_0/cgroup.threads"
    threads.write_text(threads.read_text() + "905\n")
    assert [usage.threads for usage in cgroups.usage()] == [13]
    assert str(threads) in descriptors()
    shutil.rmtree(job)
    assert cgroups.usage() == []
    assert not [name for name in descriptors() if str(job) in name]


def test_more_files_than_may_stay_open_are_read_all_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("carme_monitoring.jobs.files.SPARE", 1 << 60)
    job = version_two(root)
    cgroups = Cgroups(root, tmp_path / "proc")
    assert [usage.threads for usage in cgroups.usage()] == [12]
    assert not [name for name in descriptors() if str(job) in name]


def test_folders_are_listed_again_when_one_appeared_or_disappeared(root: Path, tmp_path: Path):
    scope = version_two(root).parent
    cgroups = Cgroups(root, tmp_path / "proc")

    def seen() -> set[int]:
        return {usage.job_id for usage in cgroups.usage(owned=range(100))}

    assert seen() == {7}
    version_two(root, name="job_8")
    assert seen() == {7, 8}
    # As many as before, but others.
    shutil.rmtree(scope / "job_7")
    version_two(root, name="job_9")
    assert seen() == {8, 9}
    (scope / "job_9/step_0").rename(scope / "job_9/step_1")
    assert [usage.steps.keys() for usage in cgroups.usage() if usage.job_id == 9] == [{"batch", "1"}]
    shutil.rmtree(scope)
    assert seen() == set()


def version_one(root: Path, job_id: int, *processes: int) -> None:
    """A job of user 2001 with one step and these processes."""
    for controller in ("freezer", "memory", "cpuacct"):
        job = root / controller / f"slurm_n1/uid_2001/job_{job_id}"
        write(job, cgroup__procs="", memory__usage_in_bytes="2000\n")
        write(job / "step_batch", cgroup__procs="".join(f"{pid}\n" for pid in processes))


def test_groups_that_slurm_could_not_remove_are_no_job(root: Path, tmp_path: Path):
    version_one(root, 7, 101)
    version_one(root, 8)
    version_one(root, 9)
    for controller in ("memory", "cpuacct"):
        shutil.rmtree(root / controller / "slurm_n1/uid_2001/job_9")  # the freezer's alone is left
    cgroups = Cgroups(root, tmp_path / "proc")
    assert [usage.job_id for usage in cgroups.usage()] == [7]
    # The prolog's record stays until the epilog: between two of its steps a job may have no process.
    assert {usage.job_id for usage in cgroups.usage(owned={8})} == {7, 8}


def test_groups_of_version_two_that_slurm_could_not_remove_are_no_job(root: Path, tmp_path: Path):
    version_two(root)
    write(version_two(root, name="job_8"), cgroup__events="populated 0\nfrozen 0\n")
    write(version_two(root, name="job_9"), cgroup__events="populated 1\nfrozen 0\n")
    assert {usage.job_id for usage in Cgroups(root, tmp_path / "proc").usage()} == {7, 9}


def test_a_number_that_another_process_has_got_is_another_process(tmp_path: Path):
    """A process's folder is another one, as for the kernel, though it has the same name."""
    processes = tmp_path / "proc"
    process(processes, 101, "python", "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0")
    cgroups = Cgroups(tmp_path, processes)
    assert [cgroups.job_of(101) for _ in range(2)] == [7, 7]
    (processes / "101").rename(processes / "ended")
    assert cgroups.job_of(101) is None
    process(processes, 101, "python", "/system.slice/slurmstepd.scope/job_8/step_0/user/task_0")
    assert cgroups.job_of(101) == 8


def test_use_is_read_for_each_step(root: Path, tmp_path: Path):
    step = version_two(root) / "step_0"
    write(
        step,
        memory__peak="90\n",
        memory__events="oom 1\noom_kill 3\n",
    )
    write(step, io__stat="8:0 rbytes=7 wbytes=9\n")
    (usage,) = Cgroups(root, tmp_path / "proc").usage()
    assert usage.steps["0"] == StepUsage(1.0, 40, 90, 3, 7, 9, 6)
    assert usage.steps["batch"] == StepUsage(1.0, 40, threads=6)


def test_version_one_counts_all_kills_in_their_step(root: Path, tmp_path: Path):
    """The kernel counts in the group of the process alone; a job has those of all its steps, ended or not."""
    version_one(root, 7, 101)
    job = root / "memory/slurm_n1/uid_2001/job_7"
    kills = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    for folder, count in ((job, 0), (job / "step_batch", 0), (job / "step_0", 1), (job / "step_0/task_0", 2)):
        write(folder, memory__oom_control=kills.format(count))
    cgroups = Cgroups(root, tmp_path / "proc")
    (usage,) = cgroups.usage()
    assert (usage.oom_kills, usage.steps["0"].oom_kills, usage.steps["batch"].oom_kills) == (3, 3, 0)
    shutil.rmtree(job / "step_0")
    (usage,) = cgroups.usage()
    assert (usage.oom_kills, usage.steps.keys()) == (3, {"batch"})


def test_version_one_lists_threads_in_each_group(root: Path, tmp_path: Path):
    version_one(root, 7, 101)
    job = root / "freezer/slurm_n1/uid_2001/job_7"
    cgroups = Cgroups(root, tmp_path / "proc")
    (usage,) = cgroups.usage()
    assert (usage.threads, usage.steps["batch"].threads) == (None, None)  # no file lists them
    write(job, tasks="")
    write(job / "step_batch", tasks="101\n102\n")
    write(job / "step_batch/task_0", tasks="".join(f"{number}\n" for number in range(1000, 6000)))
    (usage,) = cgroups.usage()
    assert (usage.threads, usage.steps["batch"].threads) == (5002, 5002)
    write(job / "step_batch/task_0", tasks="1000\n")
    (usage,) = cgroups.usage()
    assert usage.threads == 3


def test_a_job_without_a_memory_limit_reports_none(root: Path, tmp_path: Path):
    job = version_two(root)
    write(job, memory__max="max\n")
    (usage,) = Cgroups(root, tmp_path / "proc").usage()
    assert usage.memory_limit_bytes is None


def test_use_is_read_from_cgroup_version_one(root: Path, tmp_path: Path):
    path = "slurm_n1/uid_2001/job_9"
    write(
        root / "memory" / path,
        memory__usage_in_bytes="2000\n",
        memory__max_usage_in_bytes="5000\n",
        memory__limit_in_bytes="524288000\n",
        memory__stat="cache 1\ntotal_inactive_file 500\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    )
    write(root / "memory" / path / "step_batch", memory__usage_in_bytes="700\n", memory__stat="")
    write(root / "cpuacct" / path, cpuacct__stat="user 250\nsystem 50\n")
    write(root / "cpuacct" / path / "step_batch", cpuacct__usage="1500000000\n")
    write(root / "devices" / path, devices__list="c 1:3 rwm\nc 195:0 rw\nc 195:3 rw\nc 195:255 rw\nb *:* m\n")
    (usage,) = Cgroups(root, tmp_path / "proc").usage()
    assert (usage.job_id, usage.uid) == (9, 2001)
    assert usage.cpu_user_seconds == pytest.approx(2.5)  # in ticks of 1/100 s
    assert (usage.memory_bytes, usage.memory_peak_bytes, usage.oom_kills) == (1500, 5000, 1)
    assert usage.devices == {0, 3}
    assert usage.steps["batch"].cpu_seconds == pytest.approx(1.5)


def test_a_job_that_ends_while_it_is_read_leaves_gaps(root: Path, tmp_path: Path):
    job = version_two(root)
    for name in ("cpu.stat", "memory.current", "memory.peak", "io.stat"):
        (job / name).unlink()
    for step in ("step_batch", "step_0"):
        shutil.rmtree(job / step / "user")
    (usage,) = Cgroups(root, tmp_path / "proc").usage()
    assert usage.cpu_user_seconds is None
    assert usage.memory_bytes is None
    assert usage.threads is None
    assert usage.memory_limit_bytes == 524_288_000


def test_processes_outside_of_jobs_belong_to_none(root: Path, tmp_path: Path):
    processes = tmp_path / "proc"
    process(processes, 5, "sshd", "/system.slice/ssh.service")
    cgroups = Cgroups(root, processes)
    assert cgroups.usage() == []
    assert cgroups.job_of(5) is None
    assert cgroups.job_of(6) is None


def test_records_of_the_prolog_are_read(tmp_path: Path):
    folder = tmp_path / "allocations"
    folder.mkdir()
    allocations = Allocations(folder)
    record = {"user": "user1", "account": "carme", "partition": "gpu", "gpus": "0,2"}
    (folder / "7.json").write_text(json.dumps(record))
    (folder / "8.json").write_text('{"user": "user2", "gpus": ""}')
    (folder / "9.json").write_text("{half")
    (folder / "x.json").write_text("{}")
    found = allocations.all()
    assert found.keys() == {7, 8}
    assert (found[7].user, found[7].account, found[7].gpus) == ("user1", "carme", {0, 2})
    assert found[8].gpus == frozenset()
    (folder / "7.json").unlink()
    assert allocations.all().keys() == {8}


def test_a_missing_folder_of_records_is_empty(tmp_path: Path):
    assert Allocations(tmp_path / "none").all() == {}


def test_a_job_s_series_are_few_and_vanish_with_it(root: Path, tmp_path: Path):
    records = tmp_path / "allocations"
    records.mkdir()
    write(root, cgroup__controllers="cpu memory io pids\n")
    registry = CollectorRegistry()
    cgroups = Cgroups(root, tmp_path / "proc")
    registry.register(NodeCollector(GpuWatch([]), cgroups, Allocations(records)))

    def series() -> int:
        return sum(1 for line in text(registry.collect()).splitlines() if not line.startswith(b"#"))

    before = series()
    for number in range(1, 101):
        version_two(root, name=f"job_{number}")
        (records / f"{number}.json").write_text(f'{{"user": "user{number}", "gpus": "", "cpus": 2}}')
    # What it is, two of its processor time, five levels and three counters; three of each of its steps.
    assert series() - before == 100 * (11 + 2 * 3)
    for number in range(1, 101):
        shutil.rmtree(root / f"system.slice/slurmstepd.scope/job_{number}")
        (records / f"{number}.json").unlink()
    assert series() == before
