"""Groups and collectives over messages.

All members exchange directly: each sends every other member its part, and adds what came in the members'
order. So results have the same bits in every run and on every member. 16-bit numbers are added as float32.
Wire types are accepted, and change nothing. Each message says what its sender has called, so that members
that disagree get an error.
"""

import itertools
import json
import queue
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from carme_runtime.collectives import errors
from carme_runtime.collectives.errors import GaspiError, InvalidCall, Mismatch, PeerLost, Timeout
from carme_runtime.collectives.group import Unfinished
from carme_runtime.gaspi.gpi2.calls import (
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    REDUCE_SCATTER,
    REDUCTION_NAMES,
    SIZES,
    TYPE_NAMES,
    WIRE_NAMES,
    Call,
)
from carme_runtime.gaspi.gpi2.group_registry import GroupRegistry
from carme_runtime.gaspi.gpi2.mail import ABORTS, Mail
from carme_runtime.gaspi.gpi2.point_to_point import PointToPoint, ReceiveRequest, SendRequest, memory

SMALL = 4096  # bytes up to which everybody sends everything to everybody
_FLOATING = range(4)
_FIRST_OF_BITS = REDUCTION_NAMES.index("band")
_BFLOAT16 = 3
_REPORT_SECONDS = 0.2  # in which a member takes the report that the group broke, unless it was stopped
_LENGTH = struct.Struct("<I")
_REMEDY = "Call the same collectives with the same shapes and types in the same order on all ranks."


class GroupContext(Protocol):
    """What a group needs of a process that is a rank of GPI-2."""

    rank: int
    size: int
    mail: Mail
    groups: GroupRegistry

    def ping(self, rank: int) -> bool:
        """Whether a rank is there."""
        ...


class _Broken:
    """Why a group can no longer be used. Apart from it, so that who looks at this does not hold the group."""

    def __init__(self) -> None:
        self.error: GaspiError | None = None

    def check(self) -> None:
        """Raise that."""
        if self.error:
            raise self.error


class Gpi2Group:
    """Arguments and results are those of the native core's `Group`."""

    def __init__(self, context: GroupContext, ranks: Sequence[int], timeout: int, algorithm: int = 0) -> None:
        self._context = context
        self.ranks = sorted(ranks)
        for index, rank in enumerate(self.ranks):
            if not 0 <= rank < context.size or (index and rank == self.ranks[index - 1]):
                raise InvalidCall(
                    f"A group cannot hold rank {rank} (again).",
                    f"Name each rank once, from 0 to {context.size - 1}.",
                )
        if context.rank not in self.ranks:
            raise InvalidCall("This rank is not in the group.", "Form a group on its members only.")
        self.index = self.ranks.index(context.rank)
        self.size = len(self.ranks)
        self._key = context.groups.new_key(tuple(self.ranks))
        self._broken = _Broken()
        self._running = threading.Lock()
        # Threads hold the group by what is queued alone, so that they end with it.
        self._waiting: queue.SimpleQueue[tuple[Gpi2Group, Gpi2Handle, Call] | None] = queue.SimpleQueue()
        self._outstanding = 0
        self._state = threading.Lock()
        self._worker: threading.Thread | None = None
        # Buffers of what nobody waits for: they stay as long as something is queued.
        self.unfinished = Unfinished()
        self._point_to_point = PointToPoint(
            context.mail, self.ranks, self.index, self._key, self._broken.check, context.ping, self.unfinished
        )
        context.groups.add(self._key, self)
        self._run(Call(BARRIER, doing="the forming of a group", timeout=timeout))

    # Calls

    def execute(self, *arguments: Any) -> None:
        """Do a collective, after those that were submitted."""
        call = Call.of(*arguments)
        self._check(call)
        with self._state:
            alone = not self._outstanding
            if alone:
                self._outstanding += 1
        if not alone:
            self._submit(call).wait(-1)
            return
        try:
            self._run(call)
        finally:
            with self._state:
                self._outstanding -= 1

    def submit(self, *arguments: Any) -> "Gpi2Handle":
        """Do a collective in the background."""
        call = Call.of(*arguments)
        self._check(call)
        return self._submit(call)

    def measure_links(self) -> list[tuple[int, float]]:
        """Nothing: there is one way of reducing."""
        return []

    def _submit(self, call: Call) -> "Gpi2Handle":
        handle = Gpi2Handle()
        with self._state:
            self._outstanding += 1
            if self._worker is None:
                self._worker = threading.Thread(
                    target=_work, args=(self._waiting,), name="carme-gpi2-group", daemon=True
                )
                self._worker.start()
        self._waiting.put((self, handle, call))
        return handle

    def work(self, handle: "Gpi2Handle", call: Call) -> None:
        """Do what was submitted."""
        error = None
        try:
            self._run(call)
        except BaseException as found:
            error = found
        with self._state:
            self._outstanding -= 1
        handle.finish(error)

    def _check(self, call: Call) -> None:
        if REDUCTION_NAMES[call.reduction] == "mean" and call.type not in _FLOATING and call.kind != BARRIER:
            raise InvalidCall(
                f"The mean of {TYPE_NAMES[call.type]} is not an integer.", "Use sum, and divide afterwards."
            )
        if call.reduction >= _FIRST_OF_BITS and call.type in _FLOATING:
            raise InvalidCall(
                f"{TYPE_NAMES[call.type]} has no reduction {REDUCTION_NAMES[call.reduction]} of its bits.",
                "Use integers.",
            )
        if call.wire and (call.kind != ALLREDUCE or call.type != 0 or call.reduction > 1):
            raise InvalidCall(
                f"Only a sum or mean of float32 travels{WIRE_NAMES[call.wire]}.", "Leave the wire type out."
            )

    # Running one

    def _run(self, call: Call) -> None:
        with self._running:
            self._broken.check()
            call.begin()
            try:
                self._dispatch(call)
            except GaspiError as error:
                self._break(error)
                raise self._broken.error or error from None

    def _dispatch(self, call: Call) -> None:
        if call.kind == BARRIER:
            distance = 1
            while distance < self.size:
                self._send((self.index + distance) % self.size, call, b"")
                self._take((self.index - distance) % self.size, call, 0)
                distance *= 2
        elif call.kind == BROADCAST:
            self._broadcast(call)
        elif call.kind == ALLREDUCE:
            self._allreduce(call)
        elif call.kind == REDUCE_SCATTER:
            self._reduce_scatter(call)
        elif call.kind == ALLGATHER:
            total = sum(call.receive_sizes)
            own = memory(call.input, call.receive_sizes[self.index])
            self._exchange(call, [own] * self.size, memory(call.output, total), call.receive_sizes)
        else:
            cuts = _cuts(call.send_sizes)
            source = memory(call.input, cuts[-1])
            blocks = [source[a:b] for a, b in itertools.pairwise(cuts)]
            target = memory(call.output, sum(call.receive_sizes))
            self._exchange(call, blocks, target, call.receive_sizes)

    def _broadcast(self, call: Call) -> None:
        """By a binomial tree."""
        buffer = memory(call.output, call.count * SIZES[call.type])
        place = (self.index - call.root) % self.size
        distance = 1
        while distance < self.size and not place & distance:
            distance *= 2
        if place:
            buffer[:] = self._take((place - distance + call.root) % self.size, call, len(buffer))
        while distance > 1:
            distance //= 2
            if place + distance < self.size:
                self._send((place + distance + call.root) % self.size, call, buffer)

    def _allreduce(self, call: Call) -> None:
        import numpy

        size = SIZES[call.type]
        buffer = memory(call.output, call.count * size)
        values = _numbers(buffer, call.type)
        if values.nbytes <= SMALL or self.size == 1:
            raw = values.tobytes()
            for peer in self._peers():
                self._send(peer, call, raw)
            result = self._reduced(call, values, values.nbytes)
            _store(result, buffer, call.type)
            return
        cuts = [call.count * i // self.size for i in range(self.size + 1)]
        for peer in self._peers():
            self._send(peer, call, _bytes_of(values[cuts[peer] : cuts[peer + 1]]))
        own = values[cuts[self.index] : cuts[self.index + 1]]
        block = self._reduced(call, own, own.nbytes)
        if call.type == _BFLOAT16 or call.type == 2:  # all members must keep what this one rounds
            rounded = bytearray(block.size * size)
            _store(block, memoryview(rounded), call.type)
        else:
            rounded = _bytes_of(numpy.ascontiguousarray(block))
        for peer in self._peers():
            self._send(peer, call, rounded)
        buffer[cuts[self.index] * size : cuts[self.index + 1] * size] = rounded
        for peer in self._peers():
            begin, end = cuts[peer] * size, cuts[peer + 1] * size
            buffer[begin:end] = self._take(peer, call, end - begin)

    def _reduce_scatter(self, call: Call) -> None:
        size = SIZES[call.type]
        source = memory(call.input, call.count * size * self.size)
        values = _numbers(source, call.type)
        blocks = [values[i * call.count : (i + 1) * call.count] for i in range(self.size)]
        for peer in self._peers():
            self._send(peer, call, _bytes_of(blocks[peer]))
        result = self._reduced(call, blocks[self.index], blocks[self.index].nbytes)
        _store(result, memory(call.output, call.count * size), call.type)

    def _reduced(self, call: Call, own: Any, expected: int) -> Any:
        """What `own` and the next message of each other member give together, in the members' order."""
        import numpy

        functions = (
            numpy.add, numpy.add, numpy.minimum, numpy.maximum, numpy.multiply,
            numpy.bitwise_and, numpy.bitwise_or, numpy.bitwise_xor,
        )  # fmt: skip
        total: Any = None
        for member in range(self.size):
            values = own
            if member != self.index:
                values = numpy.frombuffer(self._take(member, call, expected), own.dtype)
            total = values.copy() if total is None else functions[call.reduction](total, values, out=total)
        if REDUCTION_NAMES[call.reduction] == "mean":
            total *= total.dtype.type(1.0 / self.size)
        return total

    def _exchange(self, call: Call, blocks: list[Any], target: memoryview, sizes: Sequence[int]) -> None:
        """Send a block to each member, lay what comes side by side."""
        for peer in self._peers():
            self._send(peer, call, blocks[peer])
        cuts = _cuts(sizes)
        own = bytes(blocks[self.index])
        if len(own) != sizes[self.index]:
            raise self._other_size(self.index, len(own), sizes[self.index])
        target[cuts[self.index] : cuts[self.index + 1]] = own
        for peer in self._peers():
            target[cuts[peer] : cuts[peer + 1]] = self._take(peer, call, sizes[peer])

    def _peers(self) -> list[int]:
        """The other members, each member beginning with the one after itself."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def _send(self, member: int, call: Call, content: Any) -> None:
        rank, parts = self.ranks[member], [_LENGTH.pack(len(call.summary)), call.summary, content]
        if not self._context.mail.post(rank, self._key, parts, call.deadline, self._broken.check):
            raise self._late(rank, call)

    def _take(self, member: int, call: Call, expected: int) -> memoryview:
        rank = self.ranks[member]
        message = self._context.mail.take(rank, self._key, call.deadline, self._broken.check)
        if message is None:
            raise self._late(rank, call)
        (length,) = _LENGTH.unpack_from(message)
        reported = bytes(message[_LENGTH.size : _LENGTH.size + length])
        if not call.agrees(reported):
            raise Mismatch(
                f"Rank {self._context.rank} called {call.doing}, but rank {rank} called "
                f"{Call.described(reported)}.",
                _REMEDY,
            )
        content = memoryview(message)[_LENGTH.size + length :]
        if len(content) != expected:
            raise self._other_size(member, len(content), expected)
        return content

    def _late(self, rank: int, call: Call) -> Timeout:
        return Timeout(
            f"Rank {rank} did not come to {call.doing} within {call.timeout} ms of rank "
            f"{self._context.rank}'s call.",
            "See what it does, or allow more time; this group can no longer be used.",
        )

    def _other_size(self, member: int, sent: int, expected: int) -> Mismatch:
        return Mismatch(
            f"Rank {self.ranks[member]} sends {sent} bytes to rank {self._context.rank}, which expects "
            f"{expected}.",
            "Give matching sizes on both ranks.",
        )

    # Breaking up

    def _break(self, error: GaspiError) -> None:
        """Nobody can use the group any more; notify the others why."""
        if self._broken.error:
            return
        self._broken.error = error
        message = json.dumps([type(error).__name__, error.message, error.remedy]).encode()
        content = self._key.to_bytes(8, "little") + message
        mail = self._context.mail
        for peer in self._peers():
            rank = self.ranks[peer]
            if not _report(mail, rank, content, time.monotonic() + _REPORT_SECONDS):
                # A rank that was stopped is to learn it when it goes on.
                threading.Thread(
                    target=_report, args=(mail, rank, content, None), name="carme-gpi2-report", daemon=True
                ).start()

    def receive_report(self, sender: int, content: bytes) -> None:
        """Another member has broken up."""
        kind, message, remedy = json.loads(content)
        if kind == "Timeout":  # of the other one: for this one it is the rank that went away
            kind, message = "PeerLost", f"Rank {sender} gave up: {message}"
        if not self._broken.error:
            self._broken.error = getattr(errors, kind, PeerLost)(message, remedy)
        self._context.mail.wake()

    def __del__(self) -> None:
        # Called while any lock may be held: it takes none.
        if hasattr(self, "_point_to_point"):
            self._waiting.put(None)
            self._point_to_point.close()
            self._context.mail.forget(self._key)

    # Point-to-point messages

    def send(self, member: int, at: int, size: int, tag: int, form: int) -> SendRequest:
        """Begin to send a message to a member."""
        self._check_member(member)
        return self._point_to_point.send(member, at, size, tag, form)

    def receive(self, member: int, at: int, size: int, tag: int, form: int) -> ReceiveRequest:
        """Begin to receive a message of a member."""
        self._check_member(member)
        request = self._point_to_point.receive(member, at, size, tag, form)
        request.group = self
        return request

    def sender(self, tag: int, timeout: int) -> int:
        """A member whose message is there, and that no receive expects; -1: none until `timeout`."""
        return self._point_to_point.sender(tag, timeout)

    def _check_member(self, member: int) -> None:
        if not 0 <= member < self.size:
            raise InvalidCall(
                f"There is no member {member} to exchange messages with.", "Name another member."
            )


def _report(mail: Mail, rank: int, content: bytes, deadline: float | None) -> bool:
    """Send a rank why a group broke; False: it did not take that until the deadline."""
    try:
        return mail.post(rank, ABORTS, [content], deadline)
    except GaspiError:  # it is gone, too
        return True


def _work(waiting: "queue.SimpleQueue[tuple[Gpi2Group, Gpi2Handle, Call] | None]") -> None:
    while (item := waiting.get()) is not None:
        group, handle, call = item
        group.work(handle, call)
        del item, group, handle, call


class Gpi2Handle:
    """A collective in the background."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """It ended, well or with an error."""
        self._error = error
        self._over.set()

    def wait(self, timeout: int) -> bool:
        """Wait at most `timeout` milliseconds; whether it is over. Raises what it raised."""
        if not self._over.wait(None if timeout < 0 else timeout / 1000):
            return False
        if self._error:
            raise self._error
        return True

    def done(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()


class Gpi2Plan:
    """An allreduce that is repeated on one buffer."""

    def __init__(
        self,
        group: Gpi2Group,
        at: int,
        count: int,
        kind: int,
        reduction: int,
        timeout: int,
        wire: int,
        buffer: Any,
    ) -> None:
        self._group, self._buffer = group, buffer
        self._arguments = (ALLREDUCE, 0, at, count, kind, reduction, 0, (), (), "", timeout, wire)

    def run(self) -> None:
        """Do it once more."""
        self._group.execute(*self._arguments)

    def start(self) -> Gpi2Handle:
        """Do it once more, in the background."""
        return self._group.submit(*self._arguments)


def _cuts(sizes: Sequence[int]) -> list[int]:
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    return cuts


def _bytes_of(values: Any) -> memoryview:
    return memoryview(values).cast("B") if values.size else memoryview(b"")


def _numbers(buffer: memoryview, kind: int) -> Any:
    """The buffer as numbers that NumPy can add; those of 16 bits as float32."""
    import numpy

    if kind == _BFLOAT16:
        return (numpy.frombuffer(buffer, "uint16").astype("uint32") << 16).view("float32")
    values = numpy.frombuffer(buffer, TYPE_NAMES[kind])
    return values.astype("float32") if TYPE_NAMES[kind] == "float16" else values


def _store(values: Any, buffer: memoryview, kind: int) -> None:
    """Undo `_numbers`, rounding to the nearest."""
    import numpy

    if kind == _BFLOAT16:
        bits = values.astype("float32").view("uint32")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        values = numpy.where(numpy.isnan(values), 0x7FC0, rounded).astype("uint16")
    else:
        values = values.astype(TYPE_NAMES[kind], copy=False)
    if len(buffer):
        buffer[:] = _bytes_of(numpy.ascontiguousarray(values))
