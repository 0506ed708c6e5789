"""Bad input and faults at the exporters as processes: they invent no figures and delay no reader."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from simulated_broker import SimulatedBroker, configuration

from carme.broker.overview import JobFigures, Overview
from carme.jobs import Cluster, JobState, Node
from carme_monitoring.jobs import Cgroups
from carme_monitoring.serving import CONNECTIONS

from .conftest import Starts
from .test_gpus import describe
from .test_jobs import process, version_two

CLOCK = Path(__file__).parents[2] / "simulated_clock.c"


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    return tmp_path / "gpus.txt"


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """The control groups of job 7."""
    version_two(tmp_path / "cgroup")
    return tmp_path / "cgroup"


def record(folder: Path, job_id: int, content: str | bytes) -> None:
    """What the prolog wrote about a job."""
    (folder / "allocations").mkdir(exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    (folder / f"allocations/{job_id}.json").write_bytes(data)


def test_control_groups_that_cannot_be_read_leave_gaps_and_hide_no_other_job(
    start: Starts, tmp_path: Path, groups: Path
):
    bad = version_two(groups, name="job_8")
    for name in ("cpu.stat", "memory.current", "memory.stat"):
        (bad / name).unlink()
    (bad / "cpu.stat").mkdir()  # reading it is an error for everybody, root included
    (bad / "memory.current").symlink_to("nowhere")
    (bad / "memory.stat").write_bytes(b"\xff\xfe anon 7\ninactive_file many\n")
    for step in ("step_batch", "step_0"):
        (bad / step / "user/cgroup.threads").unlink()
        (bad / step / "user/cgroup.threads").mkdir()
    (bad / "step_0/cpu.stat").chmod(0)
    exporter = start(arguments=["--cgroups", str(groups)])
    assert exporter.values("carme_job_info") == [1, 1]
    assert exporter.values("carme_job_memory_limit_bytes", jobid="8") == [524288000]
    for name in ("cpu_seconds_total", "memory_used_bytes", "threads"):
        assert exporter.values(f"carme_job_{name}", jobid="8") == []
        assert exporter.values(f"carme_job_{name}", jobid="7") != []


def test_processes_that_have_ended_belong_to_nobody(start: Starts, gpus: Path, groups: Path):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    describe(gpus, f"pids={ended.pid}:100,{os.getpid()}:200")
    (groups / "system.slice/slurmstepd.scope/job_7/step_0/user/task_0/cgroup.procs").write_text(
        f"{ended.pid}\n"
    )
    exporter = start(gpus, ["--cgroups", str(groups)])
    # This process is there and no job's; the other is known to be nobody's.
    assert exporter.values("carme_gpu_foreign_processes") == [1]
    assert exporter.values("carme_job_info", jobid="7", user="") == [1]


HOSTILE = 'ada"} 1\ncarme_fake{x="\\'


def test_hostile_names_make_no_series_of_their_own(start: Starts, tmp_path: Path, groups: Path):
    record(tmp_path, 7, json.dumps({"user": HOSTILE, "account": HOSTILE, "partition": HOSTILE}))
    version_two(groups, name="job_8")
    record(tmp_path, 8, '{"user": "bob\\ud800", "account": "\\u0000"}')  # half a pair: no text in UTF-8
    version_two(groups, name="job_9")
    record(tmp_path, 9, b'{"user": "b\xff\xfeb", "gpus": null}')
    for name in (
        "job_10\n",
        "job_\N{ARABIC-INDIC DIGIT ONE}",
        b"job_\xff".decode(errors="surrogateescape"),
        'job_1"} 1',
    ):
        version_two(groups, name=name)
    step = groups / 'system.slice/slurmstepd.scope/job_7/step_"\n\\'
    step.mkdir()
    (step / "cpu.stat").write_text("usage_usec 1\n")
    exporter = start(arguments=["--cgroups", str(groups)])
    found = exporter.scrape()
    jobs = {dict(labels)["jobid"]: dict(labels) for name, labels in found if name == "carme_job_info"}
    assert jobs.keys() == {"7", "8", "9"}
    assert (jobs["7"]["user"], jobs["7"]["account"], jobs["7"]["partition"]) == (HOSTILE,) * 3
    assert jobs["8"]["user"] == "bob?"
    assert jobs["9"]["user"] == "b\ufffd\ufffdb"
    assert not [name for name, _ in found if "fake" in name]
    steps = exporter.values("carme_step_cpu_seconds_total", jobid="7")
    assert len(steps) == 2


def test_a_title_makes_nobody_another_s_job(tmp_path: Path):
    """Where a folder does not name the job, slurmstepd's title does, and not one that a user chose."""
    if os.geteuid() != 0:
        pytest.skip("giving a process to another user needs root")
    groups, processes = tmp_path / "cgroup", tmp_path / "proc"
    job = version_two(groups, name="s4CJ2X0QF0000")
    process(processes, 101, "slurmstepd: [7.batch]", "/x")
    os.chown(processes / "101", 60_000, -1)
    for name in ("step_batch/slurm", "step_0/slurm"):
        (job / name / "cgroup.procs").write_text("")
    assert Cgroups(groups, processes).usage() == []
    process(processes, 100, "slurmstepd: [9.batch]", "/x")
    (job / "step_0/slurm/cgroup.procs").write_text("100\n")
    assert [usage.job_id for usage in Cgroups(groups, processes).usage()] == [9]


@pytest.mark.parametrize(
    ("group", "job_id"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", 7),
        ("0::/system.slice/n1_slurmstepd.scope/job_7/step_0", 7),
        ("4:memory:/libpod_parent/slurm_n1/uid_2001/job_7/step_0\n1:name=systemd:/", 7),
        ("5:cpu,cpuacct:/slurm/uid_2001/job_7", 7),
        # Groups that users make beneath their own service, or anywhere else.
        ("0::/user.slice/user-2001.slice/user@2001.service/job_7", None),
        ("0::/user.slice/user-2001.slice/user@2001.service/slurmstepd.scope/job_7", None),
        ("1:name=systemd:/user.slice/user-2001.slice/user@2001.service/slurm/uid_1/job_7\n0::/", None),
        ("0::/system.slice/other.service/job_7", None),
        ("0::/system.slice/slurmstepd.scope/job_7x", None),
    ],
)
def test_a_group_s_name_makes_nobody_another_s_job(tmp_path: Path, group: str, job_id: int | None):
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text(f"{group}\n")
    assert Cgroups(tmp_path, tmp_path / "proc").job_of(5) == job_id


def test_many_scrapes_at_once_say_the_same_and_count_an_error_once(
    start: Starts, gpus: Path, groups: Path, tmp_path: Path
):
    describe(gpus, "xid=79", "")
    record(tmp_path, 7, '{"user": "ada", "gpus": "0"}')
    exporter = start(gpus, ["--cgroups", str(groups)])
    exporter.scrape()
    before = exporter.scrape()  # GPM's figures come with the second reading
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        scrapes = list(threads.map(lambda _: exporter.scrape(), range(5 * CONNECTIONS)))
    assert all(scraped.keys() == before.keys() for scraped in scrapes)
    assert {scraped["carme_gpu_up", (("gpu", "0"), ("uuid", "GPU-0"))] for scraped in scrapes} == {1}
    errors = ("carme_gpu_xid_errors_total", (("gpu", "0"), ("uuid", "GPU-0"), ("xid", "79")))
    assert scrapes[-1][errors] == 1
    assert exporter.scrape()[errors] == 1


def test_a_clock_that_is_set_makes_nothing_negative(start: Starts, gpus: Path, groups: Path, tmp_path: Path):
    describe(gpus, "")
    (tmp_path / "clock").write_text("0")
    library = tmp_path / "simulated_clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, CLOCK, "-ldl"], check=True)
    exporter = start(
        gpus,
        ["--cgroups", str(groups)],
        environment={"LD_PRELOAD": str(library), "SIMULATED_CLOCK": str(tmp_path / "clock")},
    )
    before = exporter.scrape()
    for step in (-86400, 86400, -3_000_000):
        (tmp_path / "clock").write_text(str(step))
        after = exporter.scrape()
        assert {name for name, value in after.items() if value < 0} == set()
        assert {
            name for name, value in before.items() if name[0].endswith("_total") and after[name] < value
        } == set()


def figures(number: int, **changes: object) -> JobFigures:
    now = datetime.now(UTC)
    values: dict[str, object] = {
        "id": number, "user": "ada", "account": "research", "partition": "gpu", "state": JobState.PENDING,
        "reason": "Priority", "kind": "batch", "nodes": 1, "cpus": 4, "memory_mb": 1000, "gpus": 0,
        "gpu_type": None, "submitted": now, "started": None,
    }  # fmt: skip
    return JobFigures.model_validate(values | changes)


def test_the_cluster_exporter_outlives_outages_and_a_clock_that_was_set_back(start: Starts, tmp_path: Path):
    now = datetime.now(UTC)
    # Slurm wrote its times down before the clock was set back.
    later = now + timedelta(hours=1)
    cluster = Cluster(taken=now, nodes=[Node(name="n1", state="IDLE", cpus=8, memory_mb=1)])
    view = Overview(answered=now, cluster=cluster, jobs=[figures(1, submitted=later)])
    socket = tmp_path / "broker.sock"
    with SimulatedBroker(socket, view) as broker:
        exporter = start(program="cluster", arguments=["--config", str(configuration(tmp_path, socket))])
        assert exporter.values("carme_slurm_up") == [1]
        assert exporter.values("carme_queue_longest_wait_seconds", partition="gpu") == [0]
        started = figures(1, submitted=later, started=now, state=JobState.RUNNING)
        broker.overview = view.model_copy(update={"jobs": [started]})
        assert exporter.values("carme_queue_wait_seconds_sum", partition="gpu") == [0]
        # Slurm is away: its last snapshot stays, with its age, and says so.
        broker.overview = broker.overview.model_copy(update={"failure": "slurmctld does not answer."})
        assert exporter.values("carme_slurm_up") == [0]
        assert exporter.values("carme_slurm_answered_timestamp_seconds") == [pytest.approx(now.timestamp())]
        assert exporter.values("carme_queue_jobs", state="running") == [1]
    # The broker is away, too: no figures at all, but counts stay.
    assert exporter.values("carme_service_up", service="broker") == [0]
    assert exporter.values("carme_service_up", service="portal") == [0]
    assert exporter.values("carme_queue_jobs") == []
    assert exporter.values("carme_queue_wait_seconds_count", partition="gpu") == [1]
    socket.unlink()
    with SimulatedBroker(socket, view):
        assert exporter.values("carme_service_up", service="broker") == [1]
        assert exporter.values("carme_queue_jobs", state="pending") == [1]
