"""What a trainer waits for its blocks is counted."""

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core import store
from patience import HANG

from .test_out_of_core_store import SIZE, Program, program

__all__ = ["program"]


class Clock:
    """Time that passes in calls of a function alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes_in(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*arguments: Any) -> Any:
            self.now += 1
            return call(*arguments)

        return slowly


def test_a_wait_for_a_disk_that_fails_counts(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, block, resident = Clock(), program.new_block(), program.new_block()
    program.store.capacity = SIZE
    program.store.acquire([resident], [], 0)  # the first one leaves
    program.store.release([resident])
    program.store.waited = 0.0
    monkeypatch.setattr(store, "time", clock)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(program.store.file, "read", clock.passes_in(fail))
    with pytest.raises(CarmeRuntimeError):
        program.store.acquire([block], [], 0)
    assert program.store.waited == 1
    program.store._error = None  # or the fixture would raise it again


def test_a_wait_until_nothing_moves_counts(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, block, begun, waits = Clock(), program.new_block(), threading.Event(), threading.Event()
    monkeypatch.setattr(store, "time", clock)
    write, wait = program.store.file.write, program.store._done.wait

    def late(*arguments: Any) -> None:
        begun.set()
        assert waits.wait(HANG)
        clock.passes_in(write)(*arguments)

    def waiting() -> bool:
        waits.set()
        return wait()

    monkeypatch.setattr(program.store.file, "write", late)
    monkeypatch.setattr(program.store._done, "wait", waiting)
    program.store.leave_ahead([block])
    assert begun.wait(HANG)
    program.store.settle()
    assert program.store.waited == 1
