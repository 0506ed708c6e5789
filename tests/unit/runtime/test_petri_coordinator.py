"""Runs whose workers, coordinator or tokens are of no use: they say so, and nobody waits for ever."""

import errno
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.petri import Net, PetriError, forks, pool
from carme_runtime.petri import run as runs
from carme_runtime.petri.channel import encode
from carme_runtime.petri.pool import Connection
from carme_runtime.petri.worker import Worker
from patience import HANG

# The thread that fails reports to Python, too.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def full(name: str) -> Net:
    """A net of whose place "jobs" a worker has to make room."""
    net = Net(name)
    jobs, done = net.place("jobs", int, capacity=1, tokens=[1]), net.place("done", int)
    net.add("move", jobs >> done, lambda x: x)
    return net


def test_workers_that_end_before_a_task_begins_are_not_forked_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def end(self: Worker) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Worker, "run", end)
    with (
        full("useless").start(folder=folder, workers=1) as run,
        pytest.raises(PetriError, match="Workers end as soon as they start"),
    ):
        run.put("jobs", 2, timeout=HANG)
    assert "Too many open files" in (folder / "output.log").read_text()


def test_workers_that_are_killed_at_tasks_are_of_use(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Their first one, each time: the task has begun."""
    monkeypatch.setattr(runs, "USELESS_WORKERS", 2)
    net = Net("killed")
    x, y = net.place("x", int, tokens=[1]), net.place("y", int)

    @net.transition(x >> y, retries=9)
    def die(value, attempt):
        if attempt < 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt

    with net.start(folder=folder, workers=1) as started:
        assert started.wait(HANG)["y"] == [8]


def test_a_coordinator_that_can_start_no_workers_any_more_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    net = full("unable")
    net.add("wait", net.places["done"] >> None, lambda x: threading.Event().wait())
    with net.start(folder=folder, workers=1) as run:
        monkeypatch.setattr(forks, "start", no_memory)
        os.kill(run._pool._process, signal.SIGKILL)
        with pytest.raises(PetriError, match=r"The coordinator failed: OSError: .*Cannot allocate"):
            run.wait(HANG)
    with pytest.raises(PetriError, match="The coordinator failed"):
        run.put("jobs", 2)


def no_memory(*_: Any) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_waiting_program_gets_the_end_of_the_coordinators_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    class Ended(BaseException):
        pass

    def end(*_: Any) -> Any:
        raise Ended

    monkeypatch.setattr(runs, "_POLL_SECONDS", 0.1)
    net = Net("ended")
    net.add("wait", net.place("x", tokens=[1]) >> None, lambda x: threading.Event().wait())
    with net.start(folder=folder, workers=1) as started:
        monkeypatch.setattr(started._pool, "wait", end)
        started._pool.wake()
        with pytest.raises(PetriError, match="The coordinator failed: its thread has ended"):
            started.wait(HANG)


class Unreadable:
    """A token that only its worker can read."""

    def __reduce__(self) -> Any:
        return _read, (os.getpid(),)


def _read(process: int) -> int:
    if os.environ.get("UNREADABLE"):
        raise ValueError("not here")
    return process


def test_tokens_that_cannot_be_read_here_stay(folder: Path, monkeypatch: pytest.MonkeyPatch):
    net = Net("unreadable")
    x = net.place("x", tokens=[1])
    with net.start(folder=folder, workers=1) as run:
        run.put(x, Unreadable())
        monkeypatch.setenv("UNREADABLE", "1")
        with pytest.raises(PetriError, match="A token of place x cannot be read here: ValueError: not here"):
            run.take(x)
        monkeypatch.delenv("UNREADABLE")
        assert run.take(x, HANG) == [1, os.getpid()]


def test_a_report_in_many_parts_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch):
    """Of a worker that has ended meanwhile; else its task would run twice."""
    monkeypatch.setattr(pool, "_PART", 1000)
    connection = Connection(0)
    try:
        connection.its_tasks.sendall(encode([(1, bytes(5000))]) + encode([(2, b"")]))
        assert connection.receive() == [], "not whole yet"
        connection.its_tasks.close()
        assert connection.last_reports() == [(1, bytes(5000)), (2, b"")]
        assert connection.receive() is None
    finally:
        connection.close()


def test_workers_do_not_free_what_they_have_of_the_program(folder: Path):
    net = Net("frozen")
    x, y = net.place("x", int, tokens=[1]), net.place("y", int)
    net.add("count", x >> y, lambda x: gc.get_freeze_count())
    with net.start(folder=folder, workers=1) as run:
        assert run.wait(HANG)["y"] > [1000]
