"""Worker processes as their coordinator sees them."""

import contextlib
import mmap
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from carme_runtime.petri import forks
from carme_runtime.petri.activation import Task
from carme_runtime.petri.channel import Reader, encode
from carme_runtime.petri.net import Net
from carme_runtime.petri.store import Store
from carme_runtime.petri.worker import SLOT

#: Seconds of work that a worker is given ahead, and the most tasks.
AHEAD_SECONDS = 0.002
AHEAD_TASKS = 256
#: A task that takes less is given ahead of one that runs.
SECOND_SECONDS = 0.05
#: Seconds without a report after which a worker is asked for tasks that it has not begun.
RECALL_SECONDS = 0.02


class Connection:
    """One worker."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.process = 0
        self.given: dict[int, tuple[Task, float]] = {}
        self.load = 0.0
        self.reported = time.monotonic()
        self.useful = False
        self.stuck = False  # at a task that takes longer than expected
        self._reader = Reader()
        self._waiting = bytearray()
        self.tasks, self.its_tasks = socket.socketpair()
        self.control, self.its_control = socket.socketpair()
        for mine in (self.tasks, self.control):
            mine.setblocking(False)
            forks.ours.add(mine.fileno())

    def accepts(self) -> bool:
        """Whether it may be given one more task."""
        count = len(self.given)
        if not count or self.stuck:
            return not count
        return (self.load < AHEAD_SECONDS and count < AHEAD_TASKS) or (
            count == 1 and self.load < SECOND_SECONDS
        )

    def take(self, number: int) -> Task | None:
        """A task that it has reported."""
        entry = self.given.pop(number, None)
        if entry is None:
            return None
        self.load = self.load - entry[1] if self.given else 0.0
        return entry[0]

    def send(self, message: Any) -> None:
        """Send without waiting; what does not fit goes with `flush`."""
        self._waiting += encode(message)
        self.flush()

    def flush(self) -> bool:
        """Send what waits: whether all is gone."""
        try:
            while self._waiting:
                sent = self.tasks.send(self._waiting)
                del self._waiting[:sent]
        except BlockingIOError:
            return False
        except OSError:  # its end is reported by the fork server
            self._waiting.clear()
        return True

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._waiting)

    def receive(self) -> list[Any] | None:
        """What it has reported; None when it is gone."""
        results: list[Any] = []
        try:
            data = self.tasks.recv(1 << 18)
        except BlockingIOError:
            return results
        except OSError:
            return None
        if not data:
            return None
        for batch in self._reader.feed(data):
            results.extend(batch)
        return results

    def recall(self) -> None:
        """Ask for the tasks that it has not begun."""
        self.stuck = True
        with contextlib.suppress(OSError):
            self.control.send(b"r")

    def close(self) -> None:
        """Let go of it."""
        for mine in (self.tasks, self.control, self.its_tasks, self.its_control):
            forks.ours.discard(mine.fileno())
            mine.close()


class Pool:
    """All workers of a run."""

    def __init__(self, net: Net, folder: Path, count: int, close: list[int], store: Store) -> None:
        self._net, self._folder, self._close, self._store = net, folder, close, store
        self._slots = mmap.mmap(-1, max(count * SLOT.size, mmap.PAGESIZE))
        self._poll = select.epoll()
        self._wake_read, self._wake = os.pipe()
        for descriptor in (self._wake_read, self._wake):
            os.set_blocking(descriptor, False)
        self._poll.register(self._wake_read, select.EPOLLIN)
        self._own = [self._poll.fileno(), self._wake_read, self._wake]
        self.connections: dict[int, Connection] = {}
        self._by_descriptor: dict[int, Connection] = {}
        self._start_server()
        for slot in range(count):
            self.start(slot)

    def start(self, slot: int) -> None:
        """Start the worker of a slot."""
        connection = Connection(slot)
        SLOT.pack_into(self._slots, slot * SLOT.size, 0)
        with contextlib.suppress(OSError):
            socket.send_fds(
                self._server,
                [slot.to_bytes(4, "little")],
                [connection.its_tasks.fileno(), connection.its_control.fileno()],
            )
        connection.its_tasks.close()
        connection.its_control.close()
        self.connections[slot] = connection
        self._by_descriptor[connection.tasks.fileno()] = connection
        self._poll.register(connection.tasks, select.EPOLLIN)

    def wake(self) -> None:
        """Let `wait` return, from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"w")

    def wait(self, seconds: float) -> tuple[list[tuple[Connection, list[Any]]], list[tuple[Any, ...]]]:
        """Wait for reports: what workers reported, and what the fork server did."""
        reports: list[tuple[Connection, list[Any]]] = []
        answers: list[tuple[Any, ...]] = []
        for connection in self.connections.values():
            writing = select.EPOLLOUT if connection.is_behind else 0
            if writing:
                self._poll.modify(connection.tasks, select.EPOLLIN | writing)
        for descriptor, events in self._poll.poll(seconds):
            if descriptor == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(descriptor, 4096)
            elif descriptor == self._server.fileno():
                answers += self._answers()
            elif connection := self._by_descriptor.get(descriptor):
                if events & select.EPOLLOUT and connection.flush():
                    self._poll.modify(descriptor, select.EPOLLIN)
                if events & ~select.EPOLLOUT:
                    results = connection.receive()
                    if results is None:  # gone: the fork server says how
                        self._poll.unregister(descriptor)
                        del self._by_descriptor[descriptor]
                    elif results:
                        reports.append((connection, results))
        return reports, answers

    def last_reports(self, connection: Connection) -> list[Any]:
        """What a worker that has ended had reported still."""
        results: list[Any] = []
        while more := connection.receive():
            results += more
        return results

    def remove(self, connection: Connection) -> int:
        """Let go of a worker that has ended: the number of the task that it was at."""
        del self.connections[connection.slot]
        if self._by_descriptor.pop(connection.tasks.fileno(), None):
            self._poll.unregister(connection.tasks)
        connection.close()
        return SLOT.unpack_from(self._slots, connection.slot * SLOT.size)[0]

    def close(self) -> None:
        """End all workers."""
        self._stop_server()
        for connection in self.connections.values():
            connection.close()
        self._poll.close()
        for descriptor in (self._wake_read, self._wake):
            forks.ours.discard(descriptor)
            os.close(descriptor)

    def _start_server(self) -> None:
        self._reader = Reader()
        self._process, self._server = forks.start(
            self._net, self._folder, self._slots, [*self._close, *self._own], self._store
        )
        self._poll.register(self._server, select.EPOLLIN)

    def _stop_server(self) -> None:
        forks.ours.discard(self._server.fileno())
        with contextlib.suppress(OSError, KeyError):
            self._poll.unregister(self._server)
        self._server.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)

    def _answers(self) -> list[tuple[Any, ...]]:
        try:
            data = self._server.recv(1 << 16)
        except OSError:
            data = b""
        if data:
            return self._reader.feed(data)
        # Somebody killed it. Its workers go, too, as nobody would see their end.
        self._stop_server()
        ended: list[tuple[Any, ...]] = []
        for connection in self.connections.values():
            if connection.process:
                with contextlib.suppress(OSError):
                    os.killpg(connection.process, signal.SIGKILL)
            ended.append(("ended", connection.slot, connection.process, signal.SIGKILL))
        self._start_server()
        return ended
