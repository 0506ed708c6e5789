"""Telling open pages that something of their owner's has changed, in whichever of the portal's processes."""

import asyncio
import mmap
import os
import secrets
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Notifier", "notifier"]

#: Users share this many counters. Two of one counter hear of each other's news, and find nothing new.
COUNTERS = 65_536
_ALL = COUNTERS  # the counter of what all see
_BOOKINGS = COUNTERS + 1  # and of what bookings there are, of which no page is told
_ROW = COUNTERS + 2


@dataclass(eq=False)
class _Waiter:
    """Somebody who waits for a version other than the one that was seen."""

    seen: str
    loop: asyncio.AbstractEventLoop
    event: asyncio.Event

    def wake(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.event.set)


class Notifier:
    """What has changed for whom, for everybody who waits in this process or in those forked from it.

    A version is a word that differs from the earlier one as soon as there is something new; one of before a
    restart of the portal differs from all.

    The counters lie in memory that the processes share. Each process has a row of them, which it alone
    writes, and a version is the sum over the rows: so no process waits for another, nothing that is told can
    be lost on a way between them, and what a process told stays when it dies. An eventfd of each process
    wakes the others.
    """

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)
        self._waiting: dict[str, set[_Waiter]] = {}
        self._lock = threading.Lock()
        self._bells: list[int] = []
        self._make_rows(1)

    def _make_rows(self, count: int) -> None:
        memory = memoryview(mmap.mmap(-1, count * _ROW * 8)).cast("Q")
        self._rows = [memory[row * _ROW : (row + 1) * _ROW] for row in range(count)]
        self._own = self._rows[0]

    def share(self, processes: int) -> None:
        """Be ready for so many processes, which are forked hereafter; each says which one it is."""
        self._make_rows(processes)
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(processes)]

    def be(self, process: int) -> None:
        """This is the process of that number, or the one that takes its place; called in its event loop."""
        self._own = self._rows[process]
        asyncio.get_running_loop().add_reader(self._bells[process], self._hear, self._bells[process])

    def version(self, user: str) -> str:
        """What this user's pages show when they are made now."""
        place = _place(user)
        return f"{self._epoch}-{sum(row[_ALL] for row in self._rows)}-{sum(row[place] for row in self._rows)}"

    def common_version(self) -> str:
        """What all pages show alike when they are made now."""
        return f"{self._epoch}-{sum(row[_ALL] for row in self._rows)}"

    def bookings_version(self) -> str:
        """What bookings there are; it wakes nobody."""
        return f"{self._epoch}-{sum(row[_BOOKINGS] for row in self._rows)}"

    def count_booking(self) -> None:
        """A booking was made, changed or removed."""
        with self._lock:
            self._own[_BOOKINGS] += 1

    def notify(self, users: Iterable[str]) -> None:
        """Something of these users has changed. Any thread may say so."""
        self._notify({_place(user) for user in users})

    def notify_all(self) -> None:
        """Something that all see has changed."""
        self._notify({_ALL})

    def _notify(self, places: set[int]) -> None:
        if not places:
            return
        with self._lock:
            for place in places:
                self._own[place] += 1
        for bell in self._bells:
            os.eventfd_write(bell, 1)
        if not self._bells:
            self._wake()

    def _hear(self, bell: int) -> None:
        os.eventfd_read(bell)
        self._wake()

    def _wake(self) -> None:
        """Wake those whose version has changed."""
        with self._lock:
            for user, waiters in self._waiting.items():
                version = self.version(user)
                for waiter in waiters:
                    if waiter.seen != version:
                        waiter.wake()

    async def wait(self, user: str, seen: str, seconds: float) -> str:
        """The version, as soon as it differs from the one that was seen; after `seconds` at the latest."""
        waiter = _Waiter(seen, asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            # Who tells writes first and rings then: either this look sees it, or the bell finds the waiter.
            if (version := self.version(user)) != seen:
                return version
            self._waiting.setdefault(user, set()).add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.event.wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                waiting = self._waiting[user]
                waiting.discard(waiter)
                if not waiting:
                    del self._waiting[user]
        return self.version(user)


def _place(user: str) -> int:
    return zlib.crc32(user.encode()) % COUNTERS


notifier = Notifier()
"""The news of this process and of those that serve beside it."""
