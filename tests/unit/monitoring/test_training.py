"""What ranks report to the node's exporter: over a real socket, from processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from carme_monitoring.exposition import text
from carme_monitoring.gpus import GpuWatch
from carme_monitoring.jobs import Allocations, Cgroups, Training
from carme_monitoring.jobs.training import EXPIRES, MOST_RANKS, SILENT
from carme_monitoring.node.collector import NodeCollector
from patience import HANG

from .conftest import ROOT
from .test_jobs import process, version_two

MESSAGE: dict[str, Any] = {"rank": 0, "size": 2, "seconds": 60.0, "steps": 120, "samples": 7680}
MESSAGE |= {"loss": 0.5, "wait": {"data": 12.5, "ranks": 3.0}}
SENDER = """
import socket, sys
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for line in sys.stdin:
    sender.sendto(line.rstrip().encode(), sys.argv[1])
    print(flush=True)
"""


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sender:
    """A process that sends what a test wants."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SENDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def send(self, text: str) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Site:
    """A node whose job 7 has the processes of `senders`."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self.senders: list[Sender] = []
        self.cgroups = Cgroups(folder / "cgroup", folder / "proc")
        self.training = Training(folder / "socket", self.cgroups.job_of, clock)
        version_two(folder / "cgroup")

    def sender(self, group: str = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0") -> Sender:
        created = Sender(self.folder / "socket")
        process(self.folder / "proc", created.pid, "python", group)
        self.senders.append(created)
        return created

    def take(self, sender: Sender, *messages: str) -> None:
        for message in messages:
            sender.send(message)
            self.training.take()

    def metrics(self) -> dict[str, float]:
        registry = CollectorRegistry()
        allocations = Allocations(self.folder / "none")
        registry.register(NodeCollector(GpuWatch([]), self.cgroups, allocations, self.training))
        keys = ("jobid", "rank", "cause")
        return {
            "".join([sample.name, *(f" {key}={sample.labels.get(key)}" for key in keys)]): sample.value
            for family in text_string_to_metric_families(text(registry.collect()).decode())
            for sample in family.samples
            if sample.name.startswith("carme_training")
        }


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Iterator[Site]:
    created = Site(tmp_path, clock)
    yield created
    for sender in created.senders:
        sender.end()


def test_what_a_rank_says_is_shown_under_its_job_and_vanishes(site: Site, clock: Clock) -> None:
    site.take(site.sender(), json.dumps(MESSAGE))
    shown = site.metrics()
    assert shown["carme_training_steps_total jobid=7 rank=0 cause=None"] == 120
    assert shown["carme_training_samples_total jobid=7 rank=0 cause=None"] == 7680
    assert shown["carme_training_seconds_total jobid=7 rank=0 cause=None"] == 60
    assert shown["carme_training_wait_seconds_total jobid=7 rank=0 cause=data"] == 12.5
    assert shown["carme_training_loss jobid=7 rank=0 cause=None"] == 0.5
    assert shown["carme_training_ranks jobid=7 rank=0 cause=None"] == 2
    clock.now += EXPIRES + 1
    assert site.metrics() == {}


def test_what_was_not_measured_has_no_series(site: Site) -> None:
    site.take(site.sender(), '{"rank": 3, "size": 4, "seconds": 1.0, "steps": 2}')
    names = {name.split()[0] for name in site.metrics()}
    assert names == {f"carme_training_{name}" for name in ("seconds_total", "steps_total", "ranks")}


def test_messages_from_outside_of_jobs_are_ignored(site: Site) -> None:
    site.take(site.sender("/user.slice/user-1000.slice"), json.dumps(MESSAGE))
    assert site.training.jobs() == {}


def test_a_message_cannot_name_another_job_or_user(site: Site) -> None:
    site.take(site.sender(), json.dumps(MESSAGE | {"jobid": 8, "user": "bob", "pid": 1}))
    assert site.training.jobs().keys() == {7}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 2000,
        "{",
        "\xff",
        json.dumps(MESSAGE | {"rank": -1}),
        json.dumps(MESSAGE | {"rank": "0\nup 1"}),
        json.dumps(MESSAGE | {"rank": True}),
        json.dumps(MESSAGE | {"steps": 1e300}),
        json.dumps(MESSAGE | {"samples": 1 << 60}),
        json.dumps(MESSAGE | {"seconds": -1.0}),
        json.dumps(MESSAGE | {"loss": float("nan")}),
        json.dumps(MESSAGE | {"loss": float("inf")}),
        json.dumps(MESSAGE | {"loss": 1.5e308}),
        json.dumps(MESSAGE | {"loss": 10**400}),
        json.dumps(MESSAGE | {"seconds": 10**400}),
        json.dumps(MESSAGE | {"wait": {"data": "1"}}),
        json.dumps(MESSAGE | {"wait": 5}),
        json.dumps(MESSAGE | {"long": "x" * 5000}),
    ],
)
def test_a_hostile_message_is_dropped_and_the_next_one_is_read(site: Site, text: str) -> None:
    sender = site.sender()
    site.take(sender, text)
    assert site.training.jobs() == {}
    site.take(sender, json.dumps(MESSAGE))
    assert site.training.jobs().keys() == {7}


def test_ranks_of_a_job_are_bounded(site: Site) -> None:
    sender = site.sender()
    site.take(sender, *(json.dumps(MESSAGE | {"rank": rank}) for rank in range(MOST_RANKS + 5)))
    assert len(site.training.jobs()[7]) == MOST_RANKS


def test_two_runs_in_a_job_do_not_mix(site: Site, clock: Clock) -> None:
    first, second = site.sender(), site.sender()
    site.take(first, json.dumps(MESSAGE))
    site.take(second, json.dumps(MESSAGE | {"steps": 1}))
    assert site.training.jobs()[7][0].steps == 120
    clock.now += SILENT + 1
    site.take(second, json.dumps(MESSAGE | {"steps": 2}))
    assert site.training.jobs()[7][0].steps == 2


RANK = """
import os, time
from carme_runtime import profile, progress
progress.report(steps=1, samples=32, loss=float("nan"))
progress.report(steps=1, samples=32)
profile.recorder.add(profile.LOADING, "DataLoader", time.perf_counter() - 0.001)
child = os.fork()
if not child:
    progress.report(steps=1000)
    os._exit(0)
os.waitpid(child, 0)
"""


def rank(where: str) -> None:
    """Run a rank that makes two steps to its end, as carme_runtime sees it."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "containers/runtime/src")}
    environment |= {"CARME_METRICS": where, "RANK": "1", "WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "-c", RANK], check=True, env=environment)


def test_the_runtime_s_own_messages_are_understood(tmp_path: Path) -> None:
    training = Training(tmp_path / "socket", lambda process: 7)
    rank(str(tmp_path / "socket"))
    training.take()  # at the first step
    training.take()  # at the end
    (known,) = training.jobs()[7]
    assert (known.rank, known.size, known.steps, known.samples) == (1, 2, 2, 64)
    assert known.loss is None  # NaN is not a number to draw
    assert 0 < known.wait["data"] <= known.seconds and "ranks" not in known.wait


@pytest.mark.parametrize("prepare", [lambda path: None, lambda path: path.write_text(""), Path.mkdir])
def test_a_rank_runs_whether_or_not_somebody_listens(
    tmp_path: Path, prepare: Callable[[Path], object]
) -> None:
    prepare(tmp_path / "socket")
    rank(str(tmp_path / "socket"))


def test_after_the_exporter_s_restart_ranks_are_read_again(site: Site) -> None:
    sender = site.sender()
    site.take(sender, json.dumps(MESSAGE))
    site.training = Training(site.folder / "socket", site.cgroups.job_of)
    assert site.training.jobs() == {}
    site.take(sender, json.dumps(MESSAGE))
    assert site.training.jobs().keys() == {7}


def test_a_socket_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    path = f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}"
    done = subprocess.run(
        [sys.executable, "-m", "carme_monitoring.node.exporter", "--training", tmp_path / "none/socket"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 2
    assert f"The socket {tmp_path}/none/socket cannot be made: No such file or directory." in done.stderr


def test_the_earlier_name_of_report_works_and_warns() -> None:
    from carme_runtime import progress

    with pytest.warns(DeprecationWarning, match="now called report"):
        assert progress.tell is progress.report
