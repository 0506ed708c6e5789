"""This process as a rank of GPI-2, with the operations of the native core's context."""

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from carme_runtime.collectives.errors import InvalidCall, PeerLost, Timeout
from carme_runtime.gaspi.gpi2.group import Gpi2Group, Gpi2Plan
from carme_runtime.gaspi.gpi2.group_registry import GroupRegistry
from carme_runtime.gaspi.gpi2.health import Health
from carme_runtime.gaspi.gpi2.library import SUCCESS, TIMEOUT, Config, Library
from carme_runtime.gaspi.gpi2.mail import SLICE, Mail
from carme_runtime.gaspi.gpi2.posted import Posted, Progress
from carme_runtime.gaspi.gpi2.variables import variables

NOTIFICATIONS = 65536
PASSIVE_LIMIT = 2**20
LONGEST_LIST = 255  # parts of one list operation
PASSIVE = 1  # the key of passive messages
GROUP_ALL = 0
_BETWEEN_PINGS = 0.01  # seconds, while a rank ends
_ROOM_MS = 1  # in which operations that are over are taken out of a full queue
LEAVE_MS = 5000
_STUCK = 5.0  # seconds without an end of anything in a queue that has operations of a lost rank
_STARTED = threading.Lock()  # GPI-2 keeps one state for the process, and cannot be started again

# (local segment, local offset, remote segment, remote offset, bytes)
Part = tuple[int, int, int, int, int]


class Gpi2Context:
    """Made by `start`. Arguments and results are those of the native core's `Context`."""

    group_type = Gpi2Group
    plan_type = Gpi2Plan

    def __init__(self, library: Library, rank: int, size: int, hosts: Sequence[str], timeout: int) -> None:
        end = time.monotonic() + timeout / 1000
        self._library = library
        self.rank, self.size = rank, size
        self._nodes = [hosts.index(host) for host in hosts]
        self.cores = len(os.sched_getaffinity(0))
        # The last segment and queue carry messages.
        self._segments = library.number("segment_max") - 1
        self._queues = library.number("queue_num") - 1
        self._entries = library.number("queue_size_max")  # that a queue has
        self._longest_list = min(LONGEST_LIST, self._entries - 1)
        self._posting = [threading.Lock() for _ in range(self._queues + 1)]
        self._posted = [Posted() for _ in self._posting]
        self._memory: dict[int, mmap.mmap] = {}
        self._described: set[int] = set()  # numbers that GPI-2 knows
        self._lost = [False] * size
        self._lock = threading.Lock()
        self._segment_lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._health: Health | None = None
        self.mail = Mail(self, self._segments, self._queues, timeout)
        self.groups = GroupRegistry()
        self.mail.on_message = self.groups.on_message
        self.mail.start()
        try:
            self._health = Health(rank, hosts, self.mail, end)
        except BaseException:
            self.close()
            raise

    # What joining and groups need

    def set_link_times(self, times: Any) -> None:
        """Collectives over GPI-2 go one way whatever the links are."""

    def node_of(self, rank: int) -> int:
        """The same number for ranks of one node."""
        return self._nodes[rank]

    def close(self) -> None:
        """Leave the run. GPI-2 itself ends with the process.

        gaspi_proc_term gives up memory into which others may write still, where the process would die, drops
        what is not sent yet, and waits without limit for ranks with lower numbers.
        """
        if os.getpid() != self._process:  # a child, without the threads of this one
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        end = time.monotonic() + LEAVE_MS / 1000
        self.mail.drain(end)
        self.mail.close()
        for queue in range(self._queues + 1):
            while (code := self._library.raw("wait", queue, _ROOM_MS)) != SUCCESS and time.monotonic() < end:
                self._pause_after(code)
        if self._health:
            self._health.close()

    # Segments

    def segment_alloc(self, number: int, size: int) -> None:
        if not 0 <= number < self._segments:
            raise InvalidCall(
                f"Segment {number} is out of range.",
                f"Use numbers from 0 to {self._segments - 1}: GPI-2 has room for these.",
            )
        if size <= 0:
            raise InvalidCall("A segment of no bytes was requested.", "Give a size of at least one byte.")
        with self._segment_lock:
            if number in self._memory:
                raise InvalidCall(
                    f"Segment {number} exists already.", "Delete it first, or use another number."
                )
            self.make_segment(number, size)

    def make_segment(self, number: int, size: int) -> mmap.mmap:
        """Memory of this process as a segment. It outlives that, as long as somebody has it."""
        memory = self._bind(number, size)
        self._memory[number] = memory
        return memory

    def _bind(self, number: int, size: int) -> mmap.mmap:
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            raise InvalidCall(f"There is no memory for {size} bytes.", "Use a smaller segment.") from None
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._library.call("segment_bind", number, at, size, 0)
        # Others may write there as long as the process runs: it must not become memory of something else.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self._described.add(number)
        return memory

    def _unbind(self, number: int, memory: mmap.mmap) -> None:
        self._library.call("segment_delete", number)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(memory))

    def segment_register(self, number: int, rank: int, timeout: int) -> None:
        self._own(number, 0, 0)
        self._check_rank(rank)
        self.segment_register_reserved(number, rank, timeout)

    def segment_register_reserved(self, number: int, rank: int, timeout: int) -> None:
        """Make a segment of this rank known to another."""
        if not self._complete("segment_register", (number, rank), timeout, rank, "registering a segment"):
            raise Timeout(f"Rank {rank} did not take note of segment {number} in time.", "Register it again.")

    def wait_for_all(self, timeout: int) -> None:
        """Wait until all ranks have come here."""
        if not self._complete("barrier", (GROUP_ALL,), timeout, None, "joining"):
            raise Timeout("Not all ranks joined in time.", "See what the others say.")

    def segment_delete(self, number: int) -> None:
        with self._segment_lock:
            self._own(number, 0, 0)
            self._unbind(number, self._memory[number])
            del self._memory[number]

    def segment_size(self, number: int, rank: int) -> int:
        self._check_rank(rank)
        if rank == self.rank:
            return len(self._memory.get(number, b""))
        return self._remote_size(number, rank)

    def segment_array(self, number: int) -> Any:
        import numpy

        self._own(number, 0, 0)
        return numpy.frombuffer(self._memory[number], "uint8")

    # One-sided operations

    def _check_notice(self, notice: "tuple[int, int, int] | None") -> None:
        if notice is not None and (not 0 <= notice[1] < NOTIFICATIONS or not 0 < notice[2] < 2**32):
            raise InvalidCall(
                f"Notification {notice[1]} with value {notice[2]} cannot be sent.",
                f"Use an id below {NOTIFICATIONS} and a value other than 0.",
            )

    def write(
        self, rank: int, parts: Sequence[Part], notice: "tuple[int, int, int] | None", queue: int
    ) -> None:
        self._check(rank, queue, "a write")
        self._check_notice(notice)
        for part in parts:
            self._check_part(part, rank, "write")
        if notice is not None and not self.segment_size(notice[0], rank):
            raise InvalidCall(
                f"Rank {rank} has no segment {notice[0]} that is known here.",
                "Let it create and register the segment first.",
            )
        pieces = list(_pieces(parts))
        if len(pieces) == 1:
            local, local_offset, remote, remote_offset, size = pieces.pop()
            self.post("write", rank, queue, (local, local_offset, rank, remote, remote_offset, size))
        for begin in range(0, len(pieces), self._longest_list):
            self._post_list("write_list", rank, queue, pieces[begin : begin + self._longest_list])
        if notice is not None:  # GPI-2 keeps the order of what one queue carries to one rank
            self.post("notify", rank, queue, (notice[0], rank, notice[1], notice[2]))

    def read(
        self, rank: int, parts: Sequence[Part], notice: "tuple[int, int, int] | None", queue: int
    ) -> None:
        self._check(rank, queue, "a read")
        self._check_notice(notice)
        for part in parts:
            self._check_part(part, rank, "read")
        if notice is not None:
            self._own(notice[0], 0, 0)
        pieces = list(_pieces(parts))
        if notice is None and len(pieces) == 1:
            local, local_offset, remote, remote_offset, size = pieces.pop()
            self.post("read", rank, queue, (local, local_offset, rank, remote, remote_offset, size))
        if notice is not None and not pieces:
            self.post("notify", self.rank, queue, (notice[0], self.rank, notice[1], notice[2]))
        for begin in range(0, len(pieces), self._longest_list):
            batch = pieces[begin : begin + self._longest_list]
            if notice is None or begin + self._longest_list < len(pieces):
                self._post_list("read_list", rank, queue, batch)
            else:  # GPI-2 keeps the order of what one queue carries to one rank, and sets them to 1
                self._post_list("read_list_notify", rank, queue, batch, *notice[:2])

    def wait(self, queue: int, timeout: int) -> bool:
        self._check_queue(queue)
        end, posted, progress = _deadline(timeout), self._posted[queue], Progress()
        while True:
            before, code = posted.now(), posted.take_error()
            if code is None:
                code = self._library.raw("wait", queue, _slice(end))
            if code == SUCCESS:
                posted.over(before)
                return True
            if (rank := posted.take_lost(self.state_vector())) is not None:
                self.throw_if_lost(rank, f"waiting for queue {queue}")
            failing = posted.failing()
            if code != TIMEOUT and not (code < 0 and failing is not None):
                raise self._library.failure("wait", code)
            # What a lost rank was to answer may never be over, and hides whether all else is.
            if failing is not None and progress.is_over(self._library.number("queue_size", queue), _STUCK):
                self.throw_if_lost(failing, f"waiting for queue {queue}")
            if end is not None and time.monotonic() >= end:
                return False
            self._pause_after(code)

    def notify_waitsome(self, segment: int, first: int, count: int, timeout: int) -> int:
        self._own(segment, 0, 0)
        if not 0 <= first < NOTIFICATIONS or not 0 < count <= NOTIFICATIONS - first:
            raise InvalidCall(
                f"Notifications {first} and {count} more do not exist.", f"Keep below {NOTIFICATIONS}."
            )
        end = _deadline(timeout)
        while True:
            found = self.waitsome(segment, first, count, _slice(end))
            if found >= 0 or (end is not None and time.monotonic() >= end):
                return found

    def waitsome(self, segment: int, first: int, count: int, timeout: int) -> int:
        """Which notification is set, or -1."""
        found = ctypes.c_ulong(0)
        code = self._library.raw("notify_waitsome", segment, first, count, ctypes.byref(found), timeout)
        if code not in (SUCCESS, TIMEOUT):
            raise self._library.failure("notify_waitsome", code)
        return found.value if code == SUCCESS else -1

    def notify_reset(self, segment: int, number: int) -> int:
        self._own(segment, 0, 0)
        if not 0 <= number < NOTIFICATIONS:
            raise InvalidCall(f"There is no notification {number}.", f"Use an id below {NOTIFICATIONS}.")
        return self.reset(segment, number)

    def reset(self, segment: int, number: int) -> int:
        """Clear a notification, return its value."""
        return self._library.number("notify_reset", segment, number)

    def fetch_add(self, rank: int, segment: int, offset: int, value: int, timeout: int) -> int | None:
        return self._atomic("atomic_fetch_add", rank, segment, offset, (value,), timeout)

    def compare_swap(
        self, rank: int, segment: int, offset: int, expected: int, value: int, timeout: int
    ) -> int | None:
        return self._atomic("atomic_compare_swap", rank, segment, offset, (expected, value), timeout)

    def passive_send(self, rank: int, data: bytes, timeout: int) -> bool:
        self._check(rank, 0, "a passive send")
        if len(data) > PASSIVE_LIMIT:
            raise InvalidCall(
                f"A passive message of {len(data)} bytes is too long.", f"Send at most {PASSIVE_LIMIT} bytes."
            )
        return self.mail.post(rank, PASSIVE, [data], _deadline(timeout))

    def passive_receive(self, timeout: int) -> tuple[int, bytes] | None:
        got = self.mail.take_any(PASSIVE, _deadline(timeout))
        return None if got is None else (got[0], bytes(got[1]))

    # Health

    def state_vector(self) -> list[int]:
        # Releases have states of one byte or of four: a process that writes one leaves the rest as it was.
        room = (ctypes.c_ubyte * (4 * self.size))(*([0x55] * (4 * self.size)))
        self._library.call("state_vec_get", room)
        width = 1 if all(value == 0x55 for value in room[self.size :]) else 4
        for rank in range(self.size):
            if room[rank * width]:
                self._lost[rank] = True
        self._poll_health()
        return [int(lost) for lost in self._lost]

    def ping(self, rank: int) -> bool:
        """Whether a rank's process is there: one that was stopped is."""
        self._check_rank(rank)
        self._poll_health()
        return not self._lost[rank]

    def _poll_health(self) -> None:
        for rank in self._health.lost() if self._health else ():
            self._lost[rank] = True

    def kill(self, rank: int, timeout: int) -> bool:
        self._check_rank(rank)
        if rank == self.rank:
            raise InvalidCall(f"Rank {rank} is this one.", "Leave the program to end this rank.")
        end = _deadline(timeout)
        killed = False
        while self.ping(rank):
            killed = killed or (self._health is not None and self._health.kill(rank))
            if not killed:  # GPI-2 asks the rank itself, which ends when it runs
                code = self._library.raw("proc_kill", rank, _slice(end))
                if code not in (SUCCESS, TIMEOUT):
                    raise self._library.failure("proc_kill", code)
                killed = code == SUCCESS
            if end is not None and time.monotonic() >= end:
                return not self.ping(rank)
            time.sleep(_BETWEEN_PINGS)
        return True

    def throw_if_lost(self, rank: int, doing: str) -> None:
        """Raise PeerLost where it is."""
        if self._lost[rank]:
            raise PeerLost(
                f"Rank {rank} was lost during {doing}.",
                "Form a new group without it, or start the run again.",
            )

    # What GPI-2 does not do by itself

    def post(
        self, function: str, rank: int, queue: int, arguments: tuple[Any, ...], entries: int = 1
    ) -> None:
        """Put an operation that needs so many entries into a queue, and make room there if need be."""
        with self._posting[queue]:
            self.throw_if_lost(rank, "a one-sided operation")
            with self._posted[queue].posting(rank):
                while True:
                    # What finds the queue full counts as failed: GPI-2 then takes the rank for lost.
                    while self._library.number("queue_size", queue) + entries > self._entries:
                        code = self._library.raw("wait", queue, _ROOM_MS)
                        if code not in (SUCCESS, TIMEOUT):
                            self._posted[queue].keep_error(code)
                            self._pause_after(code)
                        self._throw_if_gone(rank)
                    code = self._library.raw(function, *arguments, queue, SLICE)
                    if code == SUCCESS:
                        return
                    if code < 0:  # GASPI_ERROR: the connection to the rank is broken
                        self._lost[rank] = True
                    self._throw_if_gone(rank)
                    if code != TIMEOUT:
                        raise self._library.failure(function, code)

    def _pause_after(self, code: int) -> None:
        """Before the next call where this one did not wait: it ended with an error."""
        if code != TIMEOUT:
            time.sleep(_ROOM_MS / 1000)

    def _throw_if_gone(self, rank: int) -> None:
        self.ping(rank)
        self.throw_if_lost(rank, "a one-sided operation")

    def _post_list(self, function: str, rank: int, queue: int, parts: list[Part], *more: int) -> None:
        count = len(parts)
        local, local_offset, remote, remote_offset, sizes = zip(*parts, strict=True)
        self.post(
            function,
            rank,
            queue,
            (
                count,
                (ctypes.c_ubyte * count)(*local),
                (ctypes.c_ulong * count)(*local_offset),
                rank,
                (ctypes.c_ubyte * count)(*remote),
                (ctypes.c_ulong * count)(*remote_offset),
                (ctypes.c_ulong * count)(*sizes),
                *more,
            ),
            entries=count + bool(more),
        )

    def _complete(
        self, function: str, arguments: tuple[Any, ...], timeout: int, rank: int | None, doing: str
    ) -> bool:
        """Call what ends with SUCCESS or TIMEOUT until the time is over, looking for deaths now and then."""
        end = _deadline(timeout)
        while True:
            code = self._library.raw(function, *arguments, _slice(end))
            if code == SUCCESS:
                return True
            if code < 0 and rank is not None:
                self._lost[rank] = True
            states = self.state_vector() if rank is None else [not self.ping(rank)]
            if any(states):
                self.throw_if_lost(states.index(True) if rank is None else rank, doing)
            if code != TIMEOUT:
                raise self._library.failure(function, code)
            if end is not None and time.monotonic() >= end:
                return False

    def _atomic(
        self, function: str, rank: int, segment: int, offset: int, values: tuple[int, ...], timeout: int
    ) -> int | None:
        self._check(rank, 0, "an atomic operation")
        if offset % 8 or not 0 <= offset <= self.segment_size(segment, rank) - 8:
            raise InvalidCall(
                f"Offset {offset} of segment {segment} of rank {rank} is no place for 8 bytes.",
                "Give a multiple of 8 within the segment.",
            )
        old = ctypes.c_ulong(0)
        arguments = (segment, offset, rank, *values, ctypes.byref(old))
        over = self._complete(function, arguments, timeout, rank, "an atomic operation")
        return old.value if over else None

    # Checks

    def _check(self, rank: int, queue: int, doing: str) -> None:
        self._check_rank(rank)
        self._check_queue(queue)
        self.throw_if_lost(rank, doing)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise InvalidCall(
                f"There is no rank {rank} among {self.size}.", f"Use a rank from 0 to {self.size - 1}."
            )

    def _check_queue(self, queue: int) -> None:
        if not 0 <= queue < self._queues:
            raise InvalidCall(f"There is no queue {queue}.", f"Use one from 0 to {self._queues - 1}.")

    def _own(self, number: int, offset: int, size: int) -> None:
        memory = self._memory.get(number)
        if memory is None or number >= self._segments:
            raise InvalidCall(f"There is no segment {number} on this rank.", "Create it first.")
        if offset < 0 or size < 0 or offset + size > len(memory):
            raise InvalidCall(
                f"Bytes {offset} to {offset + size} lie outside segment {number}, which has {len(memory)}.",
                "Keep within the segment.",
            )

    def _check_part(self, part: Part, rank: int, operation: str) -> None:
        local, local_offset, remote, remote_offset, size = part
        self._own(local, local_offset, size)
        known = self.segment_size(remote, rank)
        if remote_offset < 0 or remote_offset + size > known:
            raise InvalidCall(
                f"The {operation} reaches outside segment {remote} of rank {rank}, which has {known} "
                "bytes as far as is known here.",
                "Keep within the segment, and let its rank register it first.",
            )

    def _remote_size(self, number: int, rank: int) -> int:
        if not 0 <= number < self._segments:
            return 0
        self._describe(number)
        size = ctypes.c_ulong(0)
        code = self._library.raw("segment_size", number, rank, ctypes.byref(size))
        return size.value if code == SUCCESS else 0

    def _describe(self, number: int) -> None:
        """Let GPI-2 have an entry for a segment's number.

        Its production build looks into the entry without a check, and has none before this rank binds the
        number or another one registers it here: the process would die. No function reports that. An entry
        stays when the segment is deleted, and what others registered stays in it.
        """
        with self._segment_lock:
            if number not in self._described:
                memory = self._bind(number, 1)
                self._unbind(number, memory)
                memory.close()


def start(
    library: Library,
    rank: int | None,
    size: int | None,
    hosts: Sequence[str] | None,
    port: int | None,
    timeout: float,
) -> Gpi2Context:
    """Make this process a rank of GPI-2.

    Args:
        rank: This one's number; like `size`, `hosts` and `port` None where a launcher of GPI-2 has given the
            library by GASPI_ variables.
        size: The number of ranks.
        hosts: By rank, where it runs.
        port: Where GPI-2's ranks find each other; those of one host take the following ones.
        timeout: Seconds.
    """
    if not _STARTED.acquire(blocking=False):
        raise InvalidCall(
            "This process is or was a rank of GPI-2 already, which can be started once in a process.",
            "Use the first one, or start another process.",
        )
    milliseconds, code = max(int(timeout * 1000), 1), TIMEOUT
    try:
        reported = contextlib.nullcontext()
        if rank is not None and size is not None and hosts is not None and port is not None:
            config = Config()
            library.call("config_get", ctypes.byref(config))
            config.sn_port = port
            library.call("config_set", config)
            reported = _started_by_gaspi_run(rank, size, hosts)
        with reported:
            code = library.raw("proc_init", milliseconds)
        if code == TIMEOUT:
            raise Timeout(
                "GPI-2's ranks did not all come in time.",
                "See what the others say, and whether a firewall lies between the nodes.",
            )
        if code != SUCCESS:
            failure = library.failure("proc_init", code)
            failure.remedy += " Over Ethernet a node has room for one run of GPI-2 at a time."
            raise failure
        found = (library.number("proc_rank"), library.number("proc_num"))
        if hosts is None:
            hosts = Path(os.environ["GASPI_MFILE"]).read_text().split()[: found[1]]
        return Gpi2Context(library, *found, hosts, milliseconds)
    except BaseException:
        if code != SUCCESS:
            _STARTED.release()
        raise


@contextlib.contextmanager
def _started_by_gaspi_run(rank: int, size: int, hosts: Sequence[str]) -> Iterator[None]:
    """The variables that gaspi_run sets, while GPI-2 starts."""
    with tempfile.TemporaryDirectory(prefix="carme-gpi2-") as folder:
        machines = Path(folder) / "machines"
        machines.write_text("".join(f"{host}\n" for host in hosts))
        reported = variables(rank, size, hosts, str(machines))
        before = {name: os.environ.get(name) for name in reported}
        os.environ.update(reported)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _pieces(parts: Sequence[Part]) -> Iterator[Part]:
    """Parts that GPI-2 takes: not empty, and none longer than 1 GiB."""
    for local, local_offset, remote, remote_offset, size in parts:
        for begin in range(0, size, 2**30):
            yield local, local_offset + begin, remote, remote_offset + begin, min(2**30, size - begin)


def _deadline(timeout: int) -> float | None:
    return None if timeout < 0 else time.monotonic() + timeout / 1000


def _slice(end: float | None) -> int:
    """Milliseconds until a waiting thread looks around, or until the time is over."""
    return SLICE if end is None else max(0, min(SLICE, int((end - time.monotonic()) * 1000)))
