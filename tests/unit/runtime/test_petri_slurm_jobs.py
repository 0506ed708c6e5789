"""Nets whose functions run as jobs, by a client whose jobs are processes of this machine."""

from __future__ import annotations

import os
import pickle
import re
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

    @property
    def state(self) -> str:
        assert self.process
        return "NODE_FAIL" if self.process.returncode == -signal.SIGKILL else "FAILED"

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

    def list(self, *, q: str) -> list[LocalJob]:
        found = [file.parent for file in self.folder.glob("*/options") if f"{q}'" in file.read_text()]
        return [LocalJob(own, int((own / "number").read_text())) for own in found]


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
        (own / "number").write_text(str(process.pid))
        return LocalJob(own, process.pid, process)


def endless() -> None:
    threading.Event().wait()


class DyingClient(LocalClient):
    """The first worker that submits is killed before it knows the job's number."""

    def submit(self, what: Any, *arguments: Any, named: dict[str, Any], **options: Any) -> LocalJob:
        try:
            (self.folder / "died").mkdir(parents=True)
        except FileExistsError:
            return super().submit(what, *arguments, named=named, **options)
        super().submit(endless, named={}, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Unreachable(Exception):
    """As that of carme.Client."""

    code = "unreachable"


class SilentClient(LocalClient):
    """The first answer to a submission does not come, whether that came to the site or not."""

    comes = True

    def submit(self, what: Any, *arguments: Any, named: dict[str, Any], **options: Any) -> LocalJob:
        try:
            (self.folder / "silent").mkdir(parents=True)
        except FileExistsError:
            return super().submit(what, *arguments, named=named, **options)
        if self.comes:
            super().submit(endless, named={}, **options)
        raise Unreachable("The portal does not answer.")


class AwayClient(SilentClient):
    comes = False


class DistrustedClient(LocalClient):
    def submit(self, what: Any, *arguments: Any, named: dict[str, Any], **options: Any) -> LocalJob:
        error = Unreachable("The certificate is not trusted.")
        error.code = "certificate"
        raise error


class Denied(Exception):
    """As that of carme.Client."""


class ForgetfulJob(LocalJob):
    def result(self) -> Any:
        raise Denied("The token is over.")


class ForgetfulClient(LocalClient):
    def submit(self, what: Any, *arguments: Any, named: dict[str, Any], **options: Any) -> LocalJob:
        job = super().submit(endless, named={}, **options)
        return ForgetfulJob(job.folder, job.id, job.process)


class SlurmError(Exception):
    """As that of carme.Client."""


class BusyJob(LocalJob):
    calls = 0

    def result(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise SlurmError("Slurm does not answer.")
        return super().result()


class BusyClient(LocalClient):
    def submit(self, what: Any, *arguments: Any, named: dict[str, Any], **options: Any) -> LocalJob:
        job = super().submit(what, *arguments, named=named, **options)
        return BusyJob(job.folder, job.id, job.process)


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
    written = [file.read_text() for file in (tmp_path / "site").glob("*/options")]
    assert len(set(written)) == 6
    options = sorted(re.sub("-t[0-9a-f]{12}'", "'", each) for each in written)
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


def passed_on() -> tuple[Net, Any, Any]:
    net = Net("passed")
    x, y = net.place("x", int), net.place("y", int)

    @net.transition(x >> y)
    def same(value: int) -> int:
        if value < 0:
            os._exit(3)
        return value

    return net, x, y


def test_a_job_that_ended_and_was_not_lost_runs_once(connect: Any, tmp_path: Path):
    net, x, _ = passed_on()
    with net.start(SlurmJobs(connect, jobs=1), folder=tmp_path / "run") as run:
        run.put(x, -1)
        with pytest.raises(PetriError, match="left no result"):
            run.wait(HANG)
    assert len(list((tmp_path / "site").glob("*/options"))) == 1
    assert not list((tmp_path / "run/jobs").iterdir())


def test_a_job_that_may_not_be_over_is_cancelled_at_the_end(tmp_path: Path):
    net, x, _ = passed_on()
    with net.start(
        SlurmJobs(lambda: ForgetfulClient(tmp_path / "site"), jobs=1), folder=tmp_path / "run"
    ) as run:
        run.put(x, 1)
        with pytest.raises(PetriError, match="The token is over"):
            run.wait(HANG)
        (note,) = (tmp_path / "run/jobs").iterdir()
    assert (tmp_path / f"site/cancelled-{note.name}").exists() and not note.exists()


def test_the_job_of_a_worker_killed_while_it_submitted_it_is_cancelled_by_its_name(tmp_path: Path):
    net, x, _ = passed_on()
    with net.start(SlurmJobs(lambda: DyingClient(tmp_path / "site"), jobs=1), folder=tmp_path / "run") as run:
        run.put(x, 1)
        assert run.wait(HANG)["y"] == [1]
        # Before the task was submitted again, so that it does not run twice.
        assert len(list((tmp_path / "site").glob("cancelled-*"))) == 1
        assert not list((tmp_path / "run/jobs").iterdir())


@pytest.mark.parametrize("client", [SilentClient, AwayClient])
def test_a_submission_without_an_answer_is_cancelled_and_repeated(
    client: type[SilentClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("carme_runtime.petri.slurm_jobs._PAUSE", 0.0)
    monkeypatch.setattr("carme_runtime.petri.slurm_jobs._SUBMISSION_SECONDS", 0.1)
    net, x, _ = passed_on()
    with net.start(SlurmJobs(lambda: client(tmp_path / "site"), jobs=1), folder=tmp_path / "run") as run:
        run.put(x, 1)
        assert run.wait(HANG)["y"] == [1]
        assert len(list((tmp_path / "site").glob("cancelled-*"))) == client.comes
        assert not list((tmp_path / "run/jobs").iterdir())
    assert "submitted again: The portal does not answer." in (tmp_path / "run/output.log").read_text()


def test_what_can_never_be_submitted_fails_at_once(tmp_path: Path):
    net, x, _ = passed_on()
    jobs = SlurmJobs(lambda: DistrustedClient(tmp_path / "site"), jobs=1)
    with net.start(jobs, folder=tmp_path / "run") as run:
        run.put(x, 1)
        with pytest.raises(PetriError, match="The certificate is not trusted"):
            run.wait(HANG)
        assert not list((tmp_path / "run/jobs").iterdir())
    assert run.notices == []


def test_a_limit_is_the_time_of_the_job(connect: Any, tmp_path: Path):
    net = Net("limited")
    x, y = net.place("x", int, tokens=[1]), net.place("y", int)

    @net.transition(x >> y, limit=61)
    def same(value: int) -> int:
        return value

    for minutes in (90, 1):
        folder = tmp_path / str(minutes)
        with net.start(SlurmJobs(connect, jobs=1, minutes=minutes), folder=folder) as run:
            assert run.wait(HANG)["y"] == [1]
    written = "".join(file.read_text() for file in (tmp_path / "site").glob("*/options"))
    assert sorted(re.findall("'minutes': [0-9]+", written)) == ["'minutes': 1", "'minutes': 2"]


def test_where_slurm_does_not_answer_the_result_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("carme_runtime.petri.slurm_jobs._PAUSE", 0.0)
    net, x, _ = passed_on()
    with net.start(SlurmJobs(lambda: BusyClient(tmp_path / "site"), jobs=1), folder=tmp_path / "run") as run:
        run.put(x, 1)
        assert run.wait(HANG)["y"] == [1]
    assert len(list((tmp_path / "site").glob("*/options"))) == 1


def test_what_makes_no_sense_is_refused(tmp_path: Path):
    with pytest.raises(PetriError, match=r"A LocalClient makes no client.*SlurmJobs\(carme\.Client"):
        SlurmJobs(LocalClient(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(PetriError, match="0 is not a valid number of jobs"):
        SlurmJobs(lambda: LocalClient(tmp_path), jobs=0)

    def away() -> LocalClient:
        raise OSError("nobody answers")

    net = Net("away")
    net.place("x", int)
    with pytest.raises(PetriError, match="cannot be reached for Slurm jobs: nobody answers"):
        net.start(SlurmJobs(away), folder=tmp_path / "run", checked=False)
