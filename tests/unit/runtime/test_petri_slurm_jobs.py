"""Nets whose functions run as jobs, by a client whose jobs are processes of this machine."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from carme_runtime.petri import Net, PetriError, SlurmJobs
from patience import HANG

_RUN = """import pickle, sys
folder = sys.argv[1]
with open(f"{folder}/call", "rb") as file:
    function, given, named = pickle.load(file)
try:
    found = True, function(*given, **named)
except BaseException as error:
    found = False, error
with open(f"{folder}/result.partial", "wb") as file:
    pickle.dump(found, file)
import os
os.rename(f"{folder}/result.partial", f"{folder}/result")
"""


class JobFailed(Exception):
    """As that of carme.Client."""

    by_function = False


class LocalJob:
    """A process; its number is its job's."""

    def __init__(self, folder: Path, id: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.folder, self.id, self.process = folder, id, process

    def result(self) -> Any:
        assert self.process
        self.process.wait(HANG)
        file = self.folder / "result"
        if not file.exists():
            raise JobFailed(f"Job {self.id} left no result.")
        well, value = pickle.loads(file.read_bytes())
        if well:
            return value
        failure = JobFailed("The function failed.")
        failure.by_function = True
        raise failure from value

    def cancel(self) -> None:
        (self.folder.parent / f"cancelled-{self.id}").touch()
        os.kill(self.id, signal.SIGKILL)


class LocalJobs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, number: int) -> LocalJob:
        return LocalJob(self.folder / "any", number)


class LocalClient:
    """Starts functions as processes of this machine, and notes what each was started with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, LocalJobs(folder)

    def submit(self, what: Any, *arguments: Any, named: dict[str, Any], **options: Any) -> LocalJob:
        own = self.folder / os.urandom(8).hex()
        own.mkdir(parents=True)
        (own / "options").write_text(repr(options))
        (own / "call").write_bytes(cloudpickle.dumps((what, arguments, named)))
        process = subprocess.Popen([sys.executable, "-c", _RUN, str(own)], start_new_session=True)
        return LocalJob(own, process.pid, process)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[], LocalClient]]:
    yield lambda: LocalClient(tmp_path / "site")


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """What this file defines is not there for the jobs."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_each_task_is_a_job_with_its_options(connect: Any, tmp_path: Path):
    net = Net("jobs")
    x, y, z = net.place("x", int), net.place("y", tuple), net.place("z", int)
    offset = 10

    @net.transition(x >> y)
    def where(value: int, attempt: int) -> tuple[int, int, int]:
        return value + offset, attempt, os.getpid()

    @net.transition(y >> z)
    def two(given: tuple[int, int, int]):  # type: ignore[no-untyped-def]
        yield given[0]
        yield given[1]

    with net.start(SlurmJobs(connect, jobs=2, image="torch"), folder=tmp_path / "run") as run:
        run.put(x, 1, 2, 3)
        marking = run.wait(HANG)
        own = run.workers
    assert sorted(marking["z"]) == [1, 1, 1, 11, 12, 13] and len(own) == 2
    options = sorted(file.read_text() for file in (tmp_path / "site").glob("*/options"))
    assert (
        options
        == ["{'name': 'net-two', 'image': 'torch'}"] * 3 + ["{'name': 'net-where', 'image': 'torch'}"] * 3
    )
    assert not list((tmp_path / "run/jobs").iterdir())


def test_what_a_function_raises_is_the_nets_and_a_lost_job_runs_again(connect: Any, tmp_path: Path):
    net = Net("errors")
    x, y, bad = net.place("x", int), net.place("y", int), net.place("bad", int)
    mark = tmp_path / "lost"

    @net.transition(x >> y)
    def lose(value: int) -> int:
        try:
            (mark / str(value)).mkdir(parents=True)
        except FileExistsError:
            return value
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    @net.transition(bad >> None)
    def fail(value: int) -> None:
        raise LookupError(f"no {value} here")

    with net.start(SlurmJobs(connect, jobs=2), folder=tmp_path / "run") as run:
        run.put(x, 1, 2)
        assert sorted(run.wait(HANG)["y"]) == [1, 2]
        run.put(bad, 3)
        with pytest.raises(PetriError, match="Transition fail failed: LookupError: no 3 here"):
            run.wait(HANG)


def test_jobs_of_a_run_that_is_closed_are_cancelled(connect: Any, tmp_path: Path):
    net = Net("endless")
    x = net.place("x", int)
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)

    @net.transition(x >> None)
    def endless(value: int) -> None:
        with fifo.open("w") as file:
            file.write(str(os.getpid()))
        threading.Event().wait()

    with net.start(SlurmJobs(connect, jobs=1), folder=tmp_path / "run") as run:
        run.put(x, 1)
        job = int(fifo.read_text())
        while not (tmp_path / f"run/jobs/{job}").exists():
            time.sleep(0.01)
    assert (tmp_path / f"site/cancelled-{job}").exists()
    assert not list((tmp_path / "run/jobs").iterdir())


def test_what_makes_no_sense_is_refused(tmp_path: Path):
    with pytest.raises(PetriError, match=r"A LocalClient makes no client.*SlurmJobs\(carme\.Client"):
        SlurmJobs(LocalClient(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(PetriError, match="0 is no number of jobs"):
        SlurmJobs(lambda: LocalClient(tmp_path), jobs=0)

    def away() -> LocalClient:
        raise OSError("nobody answers")

    net = Net("away")
    net.place("x", int)
    with pytest.raises(PetriError, match="cannot be reached for Slurm jobs: nobody answers"):
        net.start(SlurmJobs(away), folder=tmp_path / "run", checked=False)
