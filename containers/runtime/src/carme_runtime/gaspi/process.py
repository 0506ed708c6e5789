"""This process as a GASPI rank."""

import contextlib
import enum
import os
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from carme_runtime import hangs
from carme_runtime.collectives.errors import GaspiError, InvalidCall, Timeout
from carme_runtime.collectives.group import Group, Pending
from carme_runtime.gaspi import rendezvous
from carme_runtime.gaspi.joining import join, join_started_by_gaspi_run, transport_of
from carme_runtime.transports import GPI2

BLOCK = -1
TEST = 0

# (local segment, local offset, remote segment, remote offset, bytes)
Part = tuple[int, int, int, int, int]


class State(enum.IntEnum):
    """Of a rank, as this one knows it."""

    HEALTHY = 0
    CORRUPT = 1


def init(
    timeout: float = 120.0, environment: "dict[str, str] | None" = None, transport: str | None = None
) -> "Process":
    """Joins the run that RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and CARME_KEY_FILE describe.

    Args:
        timeout: seconds in which all ranks must have joined.
        environment: instead of this process's own.
        transport: `native` (shared memory within a node, TCP between nodes) or `gpi2` (the GPI-2 that is
            installed); None: what CARME_TRANSPORT says, else `native`. The same on all ranks.
    """
    variables = os.environ if environment is None else environment
    hang_seconds = hangs.limit(variables)
    if transport_of(transport) == GPI2 and "RANK" not in variables and "GASPI_RANK" in variables:
        return Process(join_started_by_gaspi_run(timeout), int(timeout * 1000), hang_seconds)
    place = rendezvous.Place.from_environment(variables)
    key = rendezvous.read_key(place.key_file) if place.key_file else None
    context = join(
        place.rank,
        place.size,
        lambda entry: rendezvous.exchange(place, key, entry, timeout),
        key,
        place.address,
        place.master,
        timeout,
        transport,
    )
    return Process(context, int(timeout * 1000), hang_seconds)


class Segment:
    """Memory of this rank that other ranks can write and read."""

    def __init__(self, context: Any, number: int) -> None:
        self._context = context
        self.number = number
        self._bytes = context.segment_array(number)

    @property
    def size(self) -> int:
        """In bytes."""
        return self._bytes.size

    def array(self, dtype: Any = "uint8", offset: int = 0, count: int | None = None) -> Any:
        """A NumPy view of the segment from `offset` bytes on; all of it, or `count` elements."""
        import numpy

        kind = numpy.dtype(dtype)
        end = (
            self.size - (self.size - offset) % kind.itemsize
            if count is None
            else offset + count * kind.itemsize
        )
        if offset < 0 or offset % kind.itemsize or end > self.size:
            raise InvalidCall(
                f"Bytes {offset} to {end} of type {kind} do not fit into segment {self.number}, "
                f"which has {self.size}.",
                "Keep within the segment, at a multiple of the element's size.",
            )
        return self._bytes[offset:end].view(kind)


class Process:
    """The operations of one rank. Made by `init`."""

    def __init__(self, context: Any, timeout: int = BLOCK, hang_seconds: float = 0.0) -> None:
        self._context = context
        self.rank: int = context.rank
        self.size: int = context.size
        self._pending: dict[tuple[str, Group], Pending] = {}
        self.group_all = self.group(range(self.size), timeout)  # GASPI_GROUP_ALL
        self._watch = hangs.watch(self, self.group_all, hang_seconds)

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def close(self, wait: bool = True) -> None:
        """Leave the run. With `wait`, first let all others come to the same point (at most ten seconds)."""
        if hasattr(self._context, "sync_clock"):
            self._context.sync_clock()
        if wait and self.size > 1 and State.CORRUPT not in self.state_vector():
            with contextlib.suppress(GaspiError):  # a rank that left early does not keep this one
                self.group_all.barrier(timeout=10_000)
        if self._watch:
            self._watch.stop()
        self._pending.clear()
        self._context.close()

    # Groups

    @property
    def everyone(self) -> Group:
        """The earlier name of `group_all`."""
        warnings.warn("Process.everyone is now called group_all.", DeprecationWarning, stacklevel=2)
        return self.group_all

    def group(self, ranks: Iterable[int], timeout: int = BLOCK) -> Group:
        """Form a group; all its members call this with the same ranks."""
        return Group(self._context, list(ranks), timeout)

    def barrier(self, group: Group | None = None, timeout: int = BLOCK) -> None:
        """Wait until all members of the group have come here. After Timeout, call it again to go on."""
        group = group or self.group_all
        self._resume("barrier", group, timeout, lambda: group.barrier(asynchronous=True))

    def allreduce(
        self, array: Any, op: str = "sum", group: Group | None = None, timeout: int = BLOCK
    ) -> None:
        """Reduce `array` in place over the group. After Timeout, call it again to go on."""
        group = group or self.group_all
        self._resume("allreduce", group, timeout, lambda: group.allreduce(array, op, asynchronous=True))

    def _resume(self, name: str, group: Group, timeout: int, begin: Any) -> None:
        pending = self._pending.get((name, group)) or begin()
        self._pending[name, group] = pending
        try:
            over = pending.wait(timeout)
        except BaseException:
            del self._pending[name, group]
            raise
        if not over:
            raise Timeout(f"The {name} was not over in time.", "Call it again to go on waiting.")
        del self._pending[name, group]

    # Segments

    def segment_create(
        self, number: int, size: int, group: Group | None = None, timeout: int = BLOCK
    ) -> Segment:
        """Make a segment of `size` bytes on all members of the group, known to all of them."""
        group = group or self.group_all
        self._context.segment_alloc(number, size)
        for rank in group.ranks:
            if rank != self.rank:
                self._context.segment_register(number, rank, timeout)
        group.barrier(timeout=timeout)
        return Segment(self._context, number)

    def segment_alloc(self, number: int, size: int) -> Segment:
        """Make a segment that other nodes do not know yet."""
        self._context.segment_alloc(number, size)
        return Segment(self._context, number)

    def segment_register(self, number: int, rank: int, timeout: int = BLOCK) -> None:
        """Make a segment of this rank known to `rank`."""
        self._context.segment_register(number, rank, timeout)

    def segment_delete(self, number: int) -> None:
        """Give a segment up. Views of it stay valid in this process."""
        self._context.segment_delete(number)

    def segment_size(self, number: int, rank: int) -> int:
        """Bytes of a segment of `rank`; 0 where it is not known here."""
        return self._context.segment_size(number, rank)

    # One-sided operations

    def write(
        self,
        local_segment: int,
        local_offset: int,
        rank: int,
        segment: int,
        offset: int,
        size: int,
        queue: int = 0,
    ) -> None:
        """Write `size` bytes into a segment of `rank`.

        They are there after `wait(queue)`, and when a notification is that follows on the same queue. Until
        then the source must not change.
        """
        self._context.write(rank, [(local_segment, local_offset, segment, offset, size)], None, queue)

    def read(
        self,
        local_segment: int,
        local_offset: int,
        rank: int,
        segment: int,
        offset: int,
        size: int,
        queue: int = 0,
    ) -> None:
        """Read `size` bytes from a segment of `rank`. They are there after `wait(queue)`."""
        self._context.read(rank, [(local_segment, local_offset, segment, offset, size)], None, queue)

    def read_notify(
        self,
        local_segment: int,
        local_offset: int,
        rank: int,
        segment: int,
        offset: int,
        size: int,
        notification: int,
        queue: int = 0,
    ) -> None:
        """Read, then set a notification of `local_segment` to 1: a rank that sees it sees the data."""
        part = (local_segment, local_offset, segment, offset, size)
        self._context.read(rank, [part], (local_segment, notification, 1), queue)

    def notify(self, rank: int, segment: int, notification: int, value: int = 1, queue: int = 0) -> None:
        """Set a notification of a segment of `rank`, after all that this queue has written there."""
        self._context.write(rank, [], (segment, notification, value), queue)

    def write_notify(
        self,
        local_segment: int,
        local_offset: int,
        rank: int,
        segment: int,
        offset: int,
        size: int,
        notification: int,
        value: int = 1,
        queue: int = 0,
    ) -> None:
        """Write, then set a notification: a rank that sees it sees the data."""
        part = (local_segment, local_offset, segment, offset, size)
        self._context.write(rank, [part], (segment, notification, value), queue)

    def write_list(self, rank: int, parts: Sequence[Part], queue: int = 0) -> None:
        """Several writes to one rank; see `write`."""
        self._context.write(rank, list(parts), None, queue)

    def write_list_notify(
        self,
        rank: int,
        parts: Sequence[Part],
        segment: int,
        notification: int,
        value: int = 1,
        queue: int = 0,
    ) -> None:
        """Several writes to one rank, then a notification."""
        self._context.write(rank, list(parts), (segment, notification, value), queue)

    def read_list(self, rank: int, parts: Sequence[Part], queue: int = 0) -> None:
        """Several reads from one rank."""
        self._context.read(rank, list(parts), None, queue)

    def read_list_notify(
        self, rank: int, parts: Sequence[Part], segment: int, notification: int, queue: int = 0
    ) -> None:
        """Several reads from one rank, then a notification of the own segment `segment` is set to 1."""
        self._context.read(rank, list(parts), (segment, notification, 1), queue)

    def wait(self, queue: int = 0, timeout: int = BLOCK) -> None:
        """Wait until all operations of a queue are over: what was read is here, what was written is there."""
        if not self._context.wait(queue, timeout):
            raise Timeout(f"Queue {queue} was not empty in time.", "Call wait again to go on waiting.")

    def notify_waitsome(self, segment: int, first: int = 0, count: int = 1, timeout: int = BLOCK) -> int:
        """Wait until one of `count` notifications from `first` on is set; which one."""
        found = self._context.notify_waitsome(segment, first, count, timeout)
        if found < 0:
            raise Timeout(
                f"No notification of {first} to {first + count - 1} in segment {segment} came in time.",
                "Call it again to go on waiting.",
            )
        return found

    def notify_reset(self, segment: int, notification: int) -> int:
        """Clear a notification, return its value."""
        return self._context.notify_reset(segment, notification)

    def fetch_add(self, rank: int, segment: int, offset: int, value: int, timeout: int = BLOCK) -> int:
        """Add to an unsigned 8-byte value of `rank` atomically, return what was there."""
        return self._answer(self._context.fetch_add(rank, segment, offset, value % 2**64, timeout), rank)

    def compare_swap(
        self, rank: int, segment: int, offset: int, expected: int, value: int, timeout: int = BLOCK
    ) -> int:
        """Replace an unsigned 8-byte value of `rank` if it is `expected`, return what was there."""
        return self._answer(
            self._context.compare_swap(rank, segment, offset, expected % 2**64, value % 2**64, timeout), rank
        )

    def _answer(self, value: int | None, rank: int) -> int:
        if value is None:
            raise Timeout(f"Rank {rank} did not answer in time.", "Ask again, or see what it does.")
        return value

    def passive_send(self, rank: int, data: bytes, timeout: int = BLOCK) -> None:
        """Send a message (at most 1 MiB) to any thread that receives on `rank`."""
        if not self._context.passive_send(rank, bytes(data), timeout):
            raise Timeout(f"Rank {rank} took no message in time.", "Send it again.")

    def passive_receive(self, timeout: int = BLOCK) -> tuple[int, bytes]:
        """The next message from any rank, and who sent it."""
        got = self._context.passive_receive(timeout)
        if got is None:
            raise Timeout("No message came in time.", "Call it again to go on waiting.")
        return got

    # Health

    def state_vector(self) -> list[State]:
        """What is known of each rank."""
        return [State(value) for value in self._context.state_vector()]

    def ping(self, rank: int) -> bool:
        """Whether `rank` still runs, as far as is known here."""
        return self._context.ping(rank)

    def kill(self, rank: int, timeout: int = BLOCK) -> None:
        """End another rank at once, on whatever node, and wait until it has ended.

        A rank of another node that was stopped ends when it goes on, even where this has raised Timeout.
        """
        if not self._context.kill(rank, timeout):
            raise Timeout(f"Rank {rank} did not end in time.", "Call it again to go on waiting.")
