"""Reads what processes write, no faster than somebody prints it."""

import asyncio
import os
from collections.abc import Callable
from typing import IO

WINDOW = 2**20  # bytes of output that may be on their way to the process that prints it
CHUNK = 2**16  # bytes read at once
LINGER = 1.0  # seconds that a pipe held open by a stray grandchild is read on after the processes ended

Take = Callable[[bytes], None]


class Outputs:
    """The pipes (or terminal) of some processes.

    Args:
        settled: called whenever the last of them has ended.
    """

    def __init__(self, settled: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._settled = settled
        self._open: dict[IO[bytes], Take] = {}
        self._window = WINDOW
        self._paused = False
        self._unread = False

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, pipe: IO[bytes], take: Take) -> None:
        """Give to `take` what comes out of `pipe`, at its end b"", and close it then."""
        os.set_blocking(pipe.fileno(), False)
        self._open[pipe] = take
        if not self._paused:
            self._loop.add_reader(pipe.fileno(), self._read, pipe)

    def allow(self, count: int) -> None:
        """So many bytes were printed."""
        self._window += count
        if self._paused and (self._window > 0 or self._unread):
            self._paused = False
            for pipe in self._open:
                self._loop.add_reader(pipe.fileno(), self._read, pipe)

    def abandon(self) -> None:
        """Nobody prints them any more: read on all the same, so that no process waits for a reader."""
        self._unread = True
        self.allow(0)

    def end_soon(self) -> None:
        """The processes are gone: do not wait for ever for what others hold open."""
        self._loop.call_later(LINGER, self._drop_held)

    def _drop_held(self) -> None:
        """Close what is held open, once nothing is left in it."""
        if self._paused:
            self.end_soon()
            return
        for pipe in list(self._open):
            self._read(pipe)
            if pipe in self._open:
                self._close(pipe)

    def _read(self, pipe: IO[bytes]) -> None:
        try:
            data = os.read(pipe.fileno(), CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO: no process has the terminal any more
            data = b""
        if not data:
            self._close(pipe)
            return
        self._open[pipe](data)
        self._window -= len(data)
        if self._window <= 0 and not self._unread and not self._paused:
            self._paused = True
            for each in self._open:
                self._loop.remove_reader(each.fileno())

    def _close(self, pipe: IO[bytes]) -> None:
        self._loop.remove_reader(pipe.fileno())
        pipe.close()
        self._open.pop(pipe)(b"")
        if not self._open:
            self._settled()
