"""Limits of tasks: their time, what they need, and the length of what they say when they fail."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from carme_runtime.petri import Net, PetriError
from patience import HANG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_task_that_never_ends_is_ended_at_its_limit(folder: Path):
    """Each time counts as a failure; the programs that it has started go with it."""
    net = Net("limited")
    x, y = net.place("x", int, tokens=[7]), net.place("y", str)
    reading, writing = os.pipe()

    @net.transition(x >> y, limit=1, retries=1)
    def endless(value: int, attempt: int) -> str:
        subprocess.run(["sh", "-c", f"echo {attempt}; exec sleep 100000"], stdout=writing, check=True)
        return "never"

    with net.start(folder=folder, workers=1) as run:
        os.close(writing)
        with pytest.raises(PetriError) as caught:
            run.wait(HANG)
        sentence = "Transition endless took longer than its limit of 1 s with 7."
        assert caught.value.message == sentence and "Fix it and resume" in caught.value.remedy
        assert run.notices == [f"{sentence} It was ended; the task runs again."]
        assert run.marking() == {"x": [7], "y": []}
    with os.fdopen(reading) as lines:
        assert set(lines.read().split()) <= {"1", "2"}  # to its end: nobody has the other one any more
    net.bind("endless", lambda value: str(value))
    with Net.resume(folder, net=net, workers=1) as run:
        assert run.wait(HANG)["y"] == ["7"]


def test_a_limit_is_each_tasks_own(folder: Path):
    """Tasks given ahead to the worker that was ended run again, and do not count as having failed."""
    net = Net("own")
    x, y, z = net.place("x", int), net.place("y", int), net.place("z", int)
    mark = folder.parent / "mark"

    @net.transition(x >> y, limit=1000)
    def quick(value: int) -> int:
        return value

    @net.transition(y >> z, limit=0.5, retries=1000)  # a busy machine may take longer for any of them
    def once(value: int) -> int:
        if value == 30 and not mark.exists():
            mark.touch()
            threading.Event().wait()
        return value

    with net.start(folder=folder, workers=1) as run:
        run.put(x, *range(60))
        marking = run.wait(HANG)
    assert sorted(marking["z"]) == list(range(60))
    assert [notice for notice in run.notices if "with 30. It was ended" in notice]


@pytest.mark.parametrize("limit", [0, -1, True, "60", float("inf"), float("nan")])
def test_wrong_limits_are_refused(limit):
    net = Net("limits")
    with pytest.raises(PetriError, match="Transition t has a limit of"):
        net.add("t", net.place("x") >> None, print, limit=limit)


def test_implementations_and_subnets_keep_their_limits(folder: Path):
    part = Net("part")
    a, b = part.place("a", int, tokens=[1]), part.place("b", int)
    part.add("t", a >> b, lambda x: x, needs="gpu:1", limit=5)
    part.implementation("t", limit=7)(lambda x: x)
    net = Net("whole")
    net.include(part, "first")
    assert [each.limit for each in net.transitions.values()] == [5, 7]
    again = Net.from_pnml(net.to_pnml())
    assert [each.limit for each in again.transitions.values()] == [5, 7]


def test_a_body_that_fails_with_a_long_message_says_its_beginning(folder: Path):
    net = Net("long")
    x = net.place("x", int, tokens=[1])

    @net.transition(x >> None)
    def bad(value: int) -> None:
        raise ValueError("a" * 50_000_000)

    with net.start(folder=folder, workers=1) as run, pytest.raises(PetriError) as caught:
        run.wait(HANG)
    assert caught.value.message.startswith("Transition bad failed: ValueError: aaa")
    assert "... (50000012 characters)" in caught.value.message
    assert len(str(caught.value)) < 30_000


def test_memory_that_tasks_need_limits_what_runs_at_once(folder: Path):
    net = Net("memory")
    x, y = net.place("x", int, tokens=range(4)), net.place("y", int)
    busy = folder.parent / "busy"

    @net.transition(x >> y, needs="memory:3GiB")
    def alone(value):
        busy.mkdir()  # fails if another has it
        busy.rmdir()
        return value

    assert "alone (needs memory:3072MiB)" in net.draw()
    with pytest.raises(PetriError, match="needs memory:3072MiB, and this run offers 1024MiB") as caught:
        net.start(folder=folder, offers="memory:1GiB")
    assert caught.value.remedy == 'Start it with offers="memory:3072MiB" or more.'
    with net.start(folder=folder, offers="memory:4.5GiB") as run:
        assert len(run.wait(HANG)["y"]) == 4
