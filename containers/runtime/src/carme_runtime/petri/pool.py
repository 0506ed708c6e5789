"""Worker processes as their coordinator sees them."""

import contextlib
import mmap
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carme_runtime.petri import forks
from carme_runtime.petri.activation import Task
from carme_runtime.petri.channel import Reader, encode
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.store import Store
from carme_runtime.petri.worker import SLOT

if TYPE_CHECKING:
    from carme_runtime.fabric.members import Member
    from carme_runtime.petri.nodes import Nodes

#: Seconds of work that a worker is given ahead, and the most tasks.
AHEAD_SECONDS = 0.002
AHEAD_TASKS = 256
#: A task that takes less is given ahead of one that runs.
SECOND_SECONDS = 0.05
#: Seconds without a report after which a worker has to return tasks that it has not begun.
RECALL_SECONDS = 0.02
#: Bytes that are read of a worker at once.
_PART = 1 << 18


class Connection:
    """One worker."""

    #: Where the worker is, as the job numbers its nodes; None: on the coordinator's.
    node: int | None = None

    def __init__(self, slot: int) -> None:
        self._begin(slot)
        self._reader = Reader()
        self._waiting = bytearray()
        self.tasks, self.its_tasks = socket.socketpair()
        self.control, self.its_control = socket.socketpair()
        for connection in (self.tasks, self.control):
            connection.setblocking(False)
            forks.open_descriptors.add(connection.fileno())

    def _begin(self, slot: int) -> None:
        self.slot = slot
        self.process = 0
        self.assigned: dict[int, tuple[Task, float]] = {}
        self.load = 0.0
        self.reported = time.monotonic()
        self.useful = False
        self.overdue = 0  # the task for which it was ended, as that took longer than its limit
        self.stuck = False  # at a task that takes longer than expected

    def accepts(self) -> bool:
        """Whether it may be given one more task."""
        count = len(self.assigned)
        if not count or self.stuck:
            return not count
        return (self.load < AHEAD_SECONDS and count < AHEAD_TASKS) or (
            count == 1 and self.load < SECOND_SECONDS
        )

    def take(self, number: int) -> Task | None:
        """A task that it has reported."""
        entry = self.assigned.pop(number, None)
        if entry is None:
            return None
        self.load = self.load - entry[1] if self.assigned else 0.0
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
        data = self._read()
        if data is None:
            return []
        return self._results_in(data) if data else None

    def last_reports(self) -> list[Any]:
        """What it had reported still when it ended."""
        results: list[Any] = []
        while data := self._read():  # a long report is not whole yet after the first part
            results += self._results_in(data)
        return results

    def _read(self) -> bytes | None:
        """The next bytes; none when it is gone, None where there are none now."""
        try:
            return self.tasks.recv(_PART)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _results_in(self, data: bytes) -> list[Any]:
        return [result for batch in self._reader.feed(data) for result in batch]

    def recall(self) -> None:
        """Ask for the tasks that it has not begun."""
        self.stuck = True
        with contextlib.suppress(OSError):
            self.control.send(b"r")

    def close(self) -> None:
        """Let go of it."""
        for connection in (self.tasks, self.control, self.its_tasks, self.its_control):
            forks.open_descriptors.discard(connection.fileno())
            connection.close()


class RemoteConnection(Connection):
    """A worker on another node of the job.

    Args:
        slot: Its number among all workers.
        nodes: By which it is reached.
        node: Where it is.
        index: Its number there.
    """

    def __init__(self, slot: int, nodes: "Nodes", node: int, index: int) -> None:
        self._begin(slot)
        self._nodes, self.node, self._where, self._index = nodes, node, node, index

    def send(self, message: Any) -> None:
        self._nodes.send(self._where, "tasks", self._index, message)

    def flush(self) -> bool:
        return True

    @property
    def is_behind(self) -> bool:
        return False

    def receive(self) -> list[Any] | None:
        return None

    def last_reports(self) -> list[Any]:
        return []

    def recall(self) -> None:
        self.stuck = True
        self._nodes.send(self._where, "recall", self._index)

    def close(self) -> None:
        pass


class Pool:
    """All workers of a run.

    Args:
        net: The net.
        folder: Of the run.
        count: Workers on this node.
        close: What they must not keep open.
        store: Where ranges lie.
        job: What the programs begin with that start workers on the other nodes of the job: one per core.
            None: workers are on this node alone.
    """

    def __init__(
        self,
        net: Definition,
        folder: Path,
        count: int,
        close: list[int],
        store: Store,
        job: dict[str, Any] | None = None,
    ) -> None:
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
        self._nodes: Nodes | None = None
        self._remote: dict[int, tuple[int, int]] = {}  # by slot, the node and the number there
        self._starting: set[int] = set()  # slots whose node starts them by itself
        self._numbers: dict[int, int] = {}  # by slot, the task at which its worker ended
        #: By number, the nodes other than this one.
        self.members: dict[int, Member] = {}
        self._numbers_of: dict[str, int] = {}
        for slot in range(count):
            self.start(slot)
        if job is not None:
            try:
                self._reach_nodes(job)
            except BaseException:
                self.close()
                raise

    def _reach_nodes(self, settings: dict[str, Any]) -> None:
        from carme_runtime.petri.nodes import Nodes  # with asyncio, which takes its time to be imported

        self._nodes = Nodes(self._folder, self.wake, settings)
        self.members = {member.number: member for member in self._nodes.members}
        self._numbers_of = {member.host: member.number for member in self._nodes.members}
        slot = len(self.connections)
        for member in self.members.values():
            for index in range(settings["workers"] or member.cpus):
                self._remote[slot] = member.number, index
                self._starting.add(slot)
                self.start(slot)
                slot += 1

    @property
    def notice(self) -> str:
        """The report about nodes of the job that are not there."""
        return self._nodes.notice if self._nodes else ""

    @property
    def host(self) -> str:
        """The address of this node."""
        return self._nodes.host if self._nodes else "127.0.0.1"

    def notify(self, host: str, kind: str, *arguments: Any) -> None:
        """Send a message to the program on another node, if that is there."""
        number = self._numbers_of.get(host)
        if self._nodes and number in self.members:
            self._nodes.send(number, kind, 0, *arguments)

    def _start_remote(self, slot: int, node: int, index: int) -> None:
        if node not in self.members:
            return
        assert self._nodes
        if slot not in self._starting:
            self._nodes.send(node, "start", index)
        self._starting.discard(slot)
        self.connections[slot] = RemoteConnection(slot, self._nodes, node, index)

    def start(self, slot: int) -> None:
        """Start the worker of a slot, unless its node is lost."""
        if slot in self._remote:
            self._start_remote(slot, *self._remote[slot])
            return
        connection = Connection(slot)
        SLOT.pack_into(self._slots, slot * SLOT.size, 0, 0.0)
        # The server was killed, which `wait` sees.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
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
        for node, message in self._nodes.take() if self._nodes else ():
            self._take_message(node, message, reports, answers)
        return reports, answers

    def _take_message(
        self,
        node: int,
        message: tuple[Any, ...],
        reports: list[tuple[Connection, list[Any]]],
        answers: list[tuple[Any, ...]],
    ) -> None:
        kind, *arguments = message
        slots = {index: slot for slot, (where, index) in self._remote.items() if where == node}
        if kind in ("gone", "lost"):
            if kind == "lost":
                self.members.pop(node, None)
                answers.append((kind, node, *arguments))
            else:
                answers.append((kind, self.members[node].host))
                self._starting |= set(slots.values())
            for slot in slots.values():
                if connection := self.connections.get(slot):
                    self._numbers[slot] = next(iter(connection.assigned), 0)
                    answers.append(("ended with its node", slot, connection.process, signal.SIGKILL))
        elif kind == "reports":
            if connection := self.connections.get(slots[arguments[0]]):
                reports.append((connection, arguments[1]))
        elif kind in ("started", "overdue", "ended"):
            slot = slots[arguments[0]]
            if kind == "ended":
                self._numbers[slot] = arguments[3]
            answers.append((kind, slot, *arguments[1:3]))
        elif kind in ("held", "ask", "pulled", "finished"):
            if node in self.members:
                answers.append((kind, self.members[node].host, *arguments))
        else:
            answers.append(message)

    def patience(self) -> float:
        """Seconds to `wait`: few where a worker is idle and another one has tasks that it has not begun."""
        connections = self.connections.values()
        uneven = any(len(each.assigned) > 1 for each in connections)
        return RECALL_SECONDS if uneven and any(not each.assigned for each in connections) else 1.0

    def recall(self, now: float) -> None:
        """Idle workers get what waits behind a task that takes longer than expected."""
        connections = self.connections.values()
        if all(each.assigned for each in connections):
            return
        for each in connections:
            if len(each.assigned) > 1 and now - each.reported > RECALL_SECONDS:
                each.reported = now  # and once more if it had not read its tasks yet
                each.recall()

    def remove(self, connection: Connection) -> int:
        """Let go of a worker that has ended: the number of the task that it was at."""
        del self.connections[connection.slot]
        if isinstance(connection, RemoteConnection):
            return self._numbers.pop(connection.slot, 0)
        if self._by_descriptor.pop(connection.tasks.fileno(), None):
            self._poll.unregister(connection.tasks)
        connection.close()
        return SLOT.unpack_from(self._slots, connection.slot * SLOT.size)[0]

    def close(self) -> None:
        """End all workers."""
        if self._nodes:
            self._nodes.close()
        self._stop_server()
        for connection in self.connections.values():
            connection.close()
        self._poll.close()
        for descriptor in (self._wake_read, self._wake):
            forks.open_descriptors.discard(descriptor)
            os.close(descriptor)

    def _start_server(self) -> None:
        self._reader = Reader()
        self._process, self._server = forks.start(
            self._net, self._folder, self._slots, [*self._close, *self._own], self._store
        )
        self._poll.register(self._server, select.EPOLLIN)

    def _stop_server(self) -> None:
        forks.open_descriptors.discard(self._server.fileno())
        with contextlib.suppress(OSError, KeyError, ValueError):  # closed already, as no new one could start
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
            if isinstance(connection, RemoteConnection):
                continue
            if connection.process:
                with contextlib.suppress(OSError):
                    os.killpg(connection.process, signal.SIGKILL)
            ended.append(("ended", connection.slot, connection.process, signal.SIGKILL))
        self._start_server()
        return ended
