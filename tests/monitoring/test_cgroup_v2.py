"""Version 2 of control groups as a real kernel and Slurm have it, reported by the exporter over HTTP."""

from collections.abc import Iterator

import pytest
import real_cgroup_v2
from real_cgroup_v2 import Machine

MIB = 1 << 20
pytestmark = pytest.mark.skipif(bool(real_cgroup_v2.missing()), reason=real_cgroup_v2.missing())

#: Writes 24 MiB to the disk, and in a step of its own reads them past the page cache; then waits.
READS_AND_WRITES = """#!/bin/sh
dd if=/dev/zero of=data bs=1M count=24 conv=fsync
srun --ntasks=1 sh -c 'dd if=data of=/dev/null bs=1M iflag=direct; exec sleep 1000' &
wait
"""
#: Works in one thread for a while, and has eleven more; holds 60 MiB.
MANY_THREADS = """#!/usr/bin/python3
import threading, time
held = bytearray(60 << 20)
for _ in range(11):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
end = time.process_time() + 5
while time.process_time() < end:
    pass
time.sleep(1000)
"""
#: A step that wants more than the job has; the job goes on.
TOO_MUCH = """#!/bin/sh
srun --ntasks=1 python3 -c 'held = bytearray(400 << 20)'
sleep 1000
"""


@pytest.fixture(autouse=True)
def no_job_left() -> None:
    """Not on the demo."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with real_cgroup_v2.machine(tmp_path_factory.mktemp("machine")) as booted:
        booted.until(
            "the node takes jobs", lambda: booted.run("sinfo", "--noheader", "--format=%t").strip() == "idle"
        )
        booted.until("the exporter answers", booted.answers)
        yield booted


def submit(machine: Machine, user: str, script: str, *options: str) -> int:
    reported = machine.run("sbatch", "--parsable", "--ntasks=1", *options, user=user, data=script)
    return int(reported.strip())


def test_the_machine_has_cgroup_version_two_alone(machine: Machine) -> None:
    assert machine.run("stat", "--file-system", "--format=%T", "/sys/fs/cgroup").strip() == "cgroup2fs"
    assert "cgroup.controllers" in machine.run("ls", "/sys/fs/cgroup").split()


def test_jobs_of_two_users_are_measured_separately(machine: Machine) -> None:
    moves = submit(machine, "alice", READS_AND_WRITES, "--mem=200", "--account=physics")
    works = submit(machine, "bob", MANY_THREADS, "--mem=300")

    def reported(job_id: int, name: str, least: float) -> dict[str, float] | None:
        values = machine.values(job_id)
        return values if values.get(name, 0) >= least else None

    values = machine.until(
        "what alice's step reads is reported",
        lambda: reported(moves, "carme_step_io_read_bytes_total 0 alice", 24 * MIB),
    )
    assert values["carme_job_info gpu alice"] == 1
    assert values["carme_job_io_written_bytes_total alice"] >= 24 * MIB
    assert values["carme_step_io_written_bytes_total batch alice"] >= 24 * MIB
    assert values["carme_job_io_read_bytes_total alice"] >= values["carme_step_io_read_bytes_total 0 alice"]
    assert values["carme_job_memory_limit_bytes alice"] == 200 * MIB
    assert values["carme_job_cpus alice"] == 1

    values = machine.until(
        "bob's processor time is reported",
        lambda: reported(works, "carme_step_cpu_seconds_total batch bob", 5),
    )
    assert values["carme_job_threads bob"] == values["carme_step_threads batch bob"] + values.get(
        "carme_step_threads extern bob", 0
    )
    assert values["carme_step_threads batch bob"] == 12
    spent = sum(values[f"carme_job_cpu_seconds_total {mode} bob"] for mode in ("user", "system"))
    assert spent >= values["carme_step_cpu_seconds_total batch bob"]
    assert 60 * MIB <= values["carme_job_memory_used_bytes bob"] < 200 * MIB
    assert values["carme_job_memory_peak_bytes bob"] >= values["carme_job_memory_used_bytes bob"]
    assert values["carme_job_memory_limit_bytes bob"] == 300 * MIB
    assert values["carme_job_oom_kills_total bob"] == 0
    assert values["carme_job_io_written_bytes_total bob"] < 8 * MIB

    machine.run("scancel", str(moves), str(works))
    machine.until("their series vanish", lambda: not machine.values(moves) and not machine.values(works))


def test_a_step_that_is_killed_for_lack_of_memory_is_counted(machine: Machine) -> None:
    job_id = submit(machine, "alice", TOO_MUCH, "--mem=100")
    values = machine.until(
        "the kill is reported",
        lambda: (v := machine.values(job_id)).get("carme_job_oom_kills_total alice") and v,
    )
    assert (
        values["carme_job_memory_peak_bytes alice"]
        <= 100 * MIB
        == values["carme_job_memory_limit_bytes alice"]
    )
    machine.run("scancel", str(job_id))
    machine.until("its series vanish", lambda: not machine.values(job_id))


def test_tasks_of_an_array_are_jobs_of_their_own(machine: Machine) -> None:
    first = submit(machine, "bob", "#!/bin/sh\nexec sleep 1000\n", "--mem=50", "--array=1-2")
    jobs = machine.until(
        "both tasks run",
        lambda: (
            len(ids := machine.run("squeue", "--noheader", "--states=R", "--format=%A").split()) == 2 and ids
        ),
    )
    assert str(first) in jobs
    for job_id in map(int, jobs):
        values = machine.until(
            "the task is reported",
            lambda j=job_id: "carme_job_threads bob" in machine.values(j) and machine.values(j),
        )
        assert values["carme_job_memory_limit_bytes bob"] == 50 * MIB
    machine.run("scancel", str(first))
    machine.until("their series vanish", lambda: not any(machine.values(int(job_id)) for job_id in jobs))


def test_nothing_is_left_of_jobs_that_have_ended(machine: Machine) -> None:
    machine.until("no job is left", lambda: not machine.run("squeue", "--noheader").strip())
    machine.until(
        "no group is left",
        lambda: not machine.run("find", "/sys/fs/cgroup", "-name", "job_*").strip(),
    )
    assert not machine.run("ls", "/run/carme/allocations").strip()
    assert not [name for name, labels in machine.scrape() if "jobid" in dict(labels)]


def test_only_named_readers_reach_the_exporter(machine: Machine) -> None:
    """The firewall of the unit: only readers that the site names."""
    done = machine.run(
        "python3", "-c",
        "import socket\n"
        "with socket.socket() as s:\n"
        "    s.settimeout(5)\n"
        "    print(s.connect_ex(('10.0.2.15', 9750)))",
    )  # fmt: skip
    assert done.strip() != "0"
