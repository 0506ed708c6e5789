"""Processes that share the work, and the queue that feeds them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from carme.errors import CarmeError
from carme.staging import tree
from carme.staging.entries import Task, join
from carme.staging.queue import Queue
from carme.staging.walker import Report, Stop, Walker
from carme.translation import message as _

__all__ = ["CONTEXT", "Total", "WorkerPool"]

#: A worker reports what it has done at least so often, in seconds.
REPORT_SECONDS = 0.25
#: Forked: that is quick, and the workers inherit what they need.
CONTEXT = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1


class WorkerPool:
    """Workers.

    Args:
        count: How many.
        make: Makes what does the tasks, in the worker's process, from a callable that says whether batches
            are wanted.
    """

    def __init__(self, count: int, make: Callable[[Callable[[], bool]], Any]) -> None:
        self.count = count
        self._batches = CONTEXT.Value("i", 0)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for _each in range(count):
            parent_end, child_end = CONTEXT.Pipe()
            inherited = [*self._connections, parent_end]
            process = CONTEXT.Process(
                target=_work, args=(child_end, inherited, make, self._wanted, os.getpid()), daemon=True
            )
            process.start()
            child_end.close()
            self._connections.append(parent_end)
            self._processes.append(process)
        self._idle = set(self._connections)

    def _wanted(self) -> bool:
        with self._batches.get_lock():
            if self._batches.value >= 2 * self.count:
                return False
            self._batches.value += 1
            return True

    def run(self, queue: Queue, hear: Callable[[Report], None], tick: Callable[[], None]) -> None:
        """Have all tasks done, also those that are found on the way.

        Args:
            queue: Where they wait.
            hear: Called with each report; may add tasks.
            tick: Called some times a second.

        Raises:
            CarmeError: A worker found that the run cannot go on, or died.
        """
        while True:
            while self._idle and (tasks := queue.take(self.count)):
                connection = self._idle.pop()
                # A worker that was killed at this very moment would hold the lock for ever.
                if tasks[0][0] == "batch" and (lock := self._batches.get_lock()).acquire(timeout=5):
                    self._batches.value = max(0, self._batches.value - 1)
                    lock.release()
                with self._talking_to(connection):
                    connection.send(tasks)
            if len(self._idle) == self.count:
                return
            for connection in wait(
                [each for each in self._connections if each not in self._idle], REPORT_SECONDS
            ):
                assert isinstance(connection, Connection)
                self._receive(connection, hear)
            tick()

    def _receive(self, connection: Connection, hear: Callable[[Report], None]) -> None:
        with self._talking_to(connection):
            report: Report = connection.recv()
        if report.done:
            self._idle.add(connection)
        hear(report)
        if report.stop:
            raise CarmeError(
                _("The copy stopped: {why}.", why=report.stop),
                _("Fix that, then run the same command again; files that are already copied are skipped."),
            )

    @contextlib.contextmanager
    def _talking_to(self, connection: Connection) -> Iterator[None]:
        """Report that a worker has died, whichever way that shows: at once, or in the middle of a message."""
        try:
            yield
        except (EOFError, OSError):
            process = self._processes[self._connections.index(connection)]
            process.join(5)
            raise CarmeError(
                _("A worker ended unexpectedly (exit code {code}).", code=process.exitcode),
                _("If memory was short, use fewer workers. Run the same command again to go on from here."),
            ) from None

    def close(self) -> None:
        """End the workers, at once."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if len(self._idle) < self.count:
                process.terminate()
            process.join()


class Total:
    """Counts the files below a folder, and their bytes, ahead of those who copy them.

    Args:
        top: Descriptor of the folder.
    """

    def __init__(self, top: int) -> None:
        # Files, bytes, and whether these are all.
        self._counted = CONTEXT.Array("q", 3, lock=False)
        self._process = CONTEXT.Process(target=self._count, args=(top, os.getpid()), daemon=True)
        self._process.start()

    def known(self) -> tuple[int, int] | None:
        """Files and bytes; None as long as not all are counted."""
        return (self._counted[0], self._counted[1]) if self._counted[2] else None

    def close(self) -> None:
        """Count no more."""
        self._process.kill()
        self._process.join()

    def _count(self, top: int, parent: int) -> None:
        end_with(parent)
        waiting = [""]
        while waiting:
            path = waiting.pop()
            with contextlib.suppress(OSError), tree.folder(top, path) as here, os.scandir(here) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(join(path, entry.name))
                        continue
                    self._counted[0] += 1
                    if entry.is_file(follow_symlinks=False):
                        self._counted[1] += entry.stat(follow_symlinks=False).st_size
        self._counted[2] = 1


def end_with(parent: int) -> None:
    """Have this process killed when the one that has forked it ends, whatever either is at."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _work(
    connection: Connection,
    inherited: list[Connection],
    make: Callable[[Callable[[], bool]], Callable[[Task], None]],
    wanted: Callable[[], bool],
    parent: int,
) -> None:
    end_with(parent)
    for end in inherited:
        end.close()
    os.umask(0)
    # Millions of statuses come and go, none of them in a cycle: to look for cycles takes time.
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    worker = make(wanted)
    assert isinstance(worker, Walker) and callable(worker)
    reported = time.monotonic()

    def flush(done: bool = False) -> None:
        nonlocal reported
        report, worker.report = worker.report, Report()
        report.done = done
        connection.send(report)
        reported = time.monotonic()

    def flush_if_due() -> None:
        if time.monotonic() - reported > REPORT_SECONDS:
            flush()

    worker.flush, worker.flush_if_due = flush, flush_if_due
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for task in connection.recv():
                try:
                    worker(task)
                except Stop as stop:
                    worker.report.stop = str(stop)
                    break
                except (OSError, RuntimeError, ValueError, TypeError, AssertionError):
                    import traceback

                    worker.report.stop = f"there is a defect in the program\n{traceback.format_exc()}"
                    break
                flush_if_due()
            flush(done=True)
