"""A group of ranks and what they do together."""

import contextlib
import ctypes
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from carme_runtime import profile
from carme_runtime.collectives import forms, links
from carme_runtime.collectives.core import group_type, plan_type
from carme_runtime.collectives.errors import InvalidCall

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5, "uint8": 6}
SIZES = (4, 8, 2, 2, 4, 8, 1)
OPERATIONS = {
    "sum": 0, "mean": 1, "min": 2, "max": 3, "product": 4, "band": 5, "bor": 6, "bxor": 7,
}  # fmt: skip
WIRES = {"": 0, "bf16": 1, "int8": 2}
_BARRIER, _ALLREDUCE, _BROADCAST, _REDUCE_SCATTER, _ALLGATHER, _ALLTOALL = range(1, 7)
_NAMES = {
    _BARRIER: "barrier", _ALLREDUCE: "allreduce", _BROADCAST: "broadcast", _REDUCE_SCATTER: "reduce_scatter",
    _ALLGATHER: "allgather", _ALLTOALL: "alltoall",
}  # fmt: skip


class Unfinished:
    """Buffers of collectives that run on although nobody waits for them any more."""

    def __init__(self) -> None:
        self.held: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def add(self, handle: Any, buffers: tuple[Any, ...]) -> None:
        """Keep `buffers` until `handle` is over."""
        self.held.append((handle, buffers))

    def sweep(self) -> None:
        """Let go of what is over."""
        with contextlib.suppress(IndexError):  # collecting garbage may have called this once more meanwhile
            while self.held[0][0].done():
                self.held.popleft()


class Pending:
    """A collective that runs in the background. Its buffers must not be touched until it is over.

    Dropped before that, it leaves them to `unfinished`; without one, it is called off.
    """

    def __init__(
        self,
        handle: Any,
        buffers: tuple[Any, ...],
        unfinished: Unfinished | None = None,
        name: str = "",
        size: int = 0,
        recorded: bool = True,
    ) -> None:
        self._handle = handle
        self._buffers = buffers
        self._unfinished = unfinished
        # For `profile`: what it is, the bytes of this rank's buffer, and when it began.
        self._seen = (name, size, profile.recorder.mark()) if profile.recorder and name else None
        self._recorded = recorded

    def __del__(self) -> None:
        if self._unfinished is not None and not self._handle.done():
            self._unfinished.add(self._handle, self._buffers)

    def wait(self, timeout: int = -1) -> bool:
        """Wait at most `timeout` milliseconds; whether it is over. Raises what the collective raised."""
        if self._seen is None or profile.recorder is None:
            return self._handle.wait(timeout)
        name, size, began = self._seen
        waited = time.perf_counter()
        over = self._handle.wait(timeout)
        profile.recorder.add(profile.WAITING, name, waited)
        if over:
            profile.recorder.add(profile.COLLECTIVE, name, began[0], size, recorded=self._recorded)
            profile.recorder.waited_beside(began)
            self._seen = None
        return over

    def done(self) -> bool:
        """Whether it is over."""
        return self._handle.done()


class FromAny:
    """A message from whichever member sends first; used as a `Pending`."""

    def __init__(self, group: "Group", array: Any, tag: int, form: str) -> None:
        self._group, self._array, self._tag, self._form = group, array, tag, form
        self._request: Pending | None = None
        self.member: int | None = None  # whose message it is, once one has come

    def wait(self, timeout: int = -1) -> bool:
        """Wait at most `timeout` milliseconds; whether it is over. Raises what went wrong."""
        end = time.monotonic() + timeout / 1000
        while self._request is None:
            left = -1 if timeout < 0 else max(int((end - time.monotonic()) * 1000), 0)
            if self._begin(left):
                break
            if timeout >= 0 and time.monotonic() >= end:
                return False
        assert self._request
        return self._request.wait(-1 if timeout < 0 else max(int((end - time.monotonic()) * 1000), 0))

    def done(self) -> bool:
        """Whether it is over."""
        if self._request is None:
            self._begin(0)
        return self._request is not None and self._request.done()

    def _begin(self, timeout: int) -> bool:
        found = self._group.receive_if_sent(self._array, self._tag, self._form, timeout)
        if found:
            self.member, self._request = found
        return found is not None


class Plan:
    """An allreduce of one buffer that is repeated: everything but the work is done beforehand.

    With a wire type, what one run loses between nodes is added in the next (error feedback).
    """

    def __init__(self, plan: Any, buffer: Any, unfinished: Unfinished, recorded: bool = True) -> None:
        self._buffer = buffer
        self._recorded = recorded
        self._unfinished = unfinished
        self._run: Callable[[], None] = plan.run
        self._start = plan.start

    def run(self) -> None:
        """Run it now. `hangs` knows by this frame that a thread waits."""
        if profile.recorder is None:
            return self._run()
        began = time.perf_counter()
        self._run()
        profile.recorder.add(profile.WAITING, "allreduce", began)
        size = _size(self._buffer)
        profile.recorder.add(profile.COLLECTIVE, "allreduce", began, size, recorded=self._recorded)

    def start(self) -> Pending:
        """Begin in the background."""
        if profile.recorder is None:
            return Pending(self._start(), (self._buffer,), self._unfinished)
        size = _size(self._buffer)
        return Pending(self._start(), (self._buffer,), self._unfinished, "allreduce", size, self._recorded)


class Group:
    """Ranks that work together; all members make it, and call its methods in the same order.

    Buffers are contiguous NumPy arrays or torch tensors in host memory, or bytearrays that keep their size.
    `timeout` is in milliseconds, -1
    waits for ever; a group in which one was exceeded, or a rank was lost, can no longer be used. With
    `asynchronous=True` a method returns a `Pending` at once. `label` names the buffer in messages. Members
    that call something else, or with another label, type, shape or size, get a Mismatch.

    Args:
        context: The transport's, connected.
        ranks: Of the run.
        timeout: For the forming of the group, milliseconds.
        algorithm: How more than two nodes reduce: `direct` (everybody to everybody), `ring`, `halving`
            (recursive halving and doubling), or `auto`: the one that the times of the links make the
            shortest. None: what CARME_ALLREDUCE says, else `auto`.
    """

    def __init__(
        self, context: Any, ranks: list[int], timeout: int = -1, algorithm: str | None = None
    ) -> None:
        self._context = context
        self._group = group_type(context)(context, ranks, timeout, links.algorithm(algorithm))
        # Goes after the core's group, which ends what still runs. That of GPI-2 goes on, and has its own.
        self._unfinished: Unfinished = getattr(self._group, "unfinished", None) or Unfinished()
        self._choosing = threading.Lock()
        self._recorded = not hasattr(context, "group_type")  # by the core, which knows when they run
        if links.should_measure() and len(ranks) == context.size > 1:
            times = self._group.measure_links()
            if times:
                context.set_link_times(times)
        self._plan = plan_type(context)
        self.ranks: list[int] = self._group.ranks
        self.index: int = self._group.index
        self.size: int = self._group.size

    @property
    def context(self) -> Any:
        """The transport's."""
        return self._context

    def of_some(self, ranks: list[int], timeout: int = -1) -> "Group":
        """A group of some members, named by their numbers here; these make it together."""
        return Group(self._context, [self.ranks[member] for member in ranks], timeout)

    def measure_links(self) -> list[tuple[int, float]]:
        """Bytes and microseconds of messages on the slowest link between nodes. Nothing on one node."""
        return self._group.measure_links()

    def barrier(self, timeout: int = -1, asynchronous: bool = False) -> Pending | None:
        """Wait until all members have come here."""
        return self._call(_BARRIER, (), 0, 0, 0, 0, timeout=timeout, asynchronous=asynchronous)

    def allreduce(
        self,
        array: Any,
        op: str = "sum",
        label: str = "",
        timeout: int = -1,
        asynchronous: bool = False,
        wire: str = "",
    ) -> Pending | None:
        """Reduce `array` over all members, in place.

        Args:
            array: The buffer.
            op: sum, mean, min, max or product; of integers also band, bor or bxor.
            label: Names the buffer in messages.
            timeout: Milliseconds.
            asynchronous: Return a `Pending` at once.
            wire: How float32 travels between nodes, for sums and means of more than 16 KiB. `bf16`: each
                number on its way is rounded to 8 significant bits. `int8`: to a level of 1/127 of the
                largest magnitude among 256 neighbours. Every number is rounded once in each step that it
                takes: at most as often as there are nodes.
        """
        at, count, kind = locate(array)
        reduction = operation(op)
        return self._call(
            _ALLREDUCE,
            (array,),
            0,
            at,
            count,
            kind,
            reduction,
            0,
            (),
            (),
            _with_shape(label, array),
            timeout,
            asynchronous,
            wire_type(wire),
        )

    def plan_allreduce(self, array: Any, op: str = "sum", timeout: int = -1, wire: str = "") -> Plan:
        """Prepare an allreduce of `array` that will be run many times; see `allreduce`."""
        at, count, kind = locate(array)
        plan = self._plan(self._group, at, count, kind, operation(op), timeout, wire_type(wire), array)
        return Plan(plan, array, self._unfinished, self._recorded)

    def broadcast(
        self, array: Any, root: int = 0, label: str = "", timeout: int = -1, asynchronous: bool = False
    ) -> Pending | None:
        """Give all members what member number `root` of the group has in `array`."""
        if not 0 <= root < self.size:
            raise InvalidCall(
                f"There is no member {root} in a group of {self.size}.",
                f"Use a number from 0 to {self.size - 1}.",
            )
        at, count, kind = locate(array)
        return self._call(
            _BROADCAST,
            (array,),
            0,
            at,
            count,
            kind,
            0,
            root,
            (),
            (),
            _with_shape(label, array),
            timeout,
            asynchronous,
        )

    def reduce_scatter(
        self,
        output: Any,
        source: Any,
        op: str = "sum",
        label: str = "",
        timeout: int = -1,
        asynchronous: bool = False,
    ) -> Pending | None:
        """Reduce `source` over all members; member i gets the i-th of equal blocks in `output`."""
        at, count, kind = locate(output)
        source_at, source_count, source_kind = locate(source)
        if kind != source_kind or source_count != count * self.size:
            raise InvalidCall(
                f"reduce_scatter got {source_count} elements for blocks of {count} on {self.size} members.",
                f"Give a source of the same type with {count * self.size} elements.",
            )
        return self._call(
            _REDUCE_SCATTER,
            (output, source),
            source_at,
            at,
            count,
            kind,
            operation(op),
            0,
            (),
            (),
            _with_shape(label, output),
            timeout,
            asynchronous,
        )

    def allgather(
        self,
        output: Any,
        source: Any,
        counts: Sequence[int] | None = None,
        label: str = "",
        timeout: int = -1,
        asynchronous: bool = False,
    ) -> Pending | None:
        """Lay the `source` of all members side by side in `output`; `counts`: by member, if they differ."""
        at, count, kind = locate(output)
        source_at, source_count, source_kind = locate(source)
        counts = [source_count] * self.size if counts is None else list(counts)
        if (
            kind != source_kind
            or len(counts) != self.size
            or sum(counts) != count
            or counts[self.index] != source_count
        ):
            raise InvalidCall(
                f"allgather got {source_count} elements here, counts {counts} and room for {count}.",
                "Give one count per member, and room of the same type for all of them.",
            )
        sizes = [c * SIZES[kind] for c in counts]
        return self._call(
            _ALLGATHER,
            (output, source),
            source_at,
            at,
            count,
            kind,
            0,
            0,
            (),
            sizes,
            label,
            timeout,
            asynchronous,
        )

    def alltoall(
        self,
        output: Any,
        source: Any,
        receive_counts: Sequence[int] | None = None,
        send_counts: Sequence[int] | None = None,
        label: str = "",
        timeout: int = -1,
        asynchronous: bool = False,
    ) -> Pending | None:
        """Send the i-th part of `source` to member i; parts are equal unless counts of elements are given."""
        at, count, kind = locate(output)
        source_at, source_count, source_kind = locate(source)
        send = self._parts("source", source_count, send_counts)
        receive = self._parts("output", count, receive_counts)
        if kind != source_kind:
            raise InvalidCall("alltoall got source and output of different types.", "Use one type for both.")
        element = SIZES[kind]
        return self._call(
            _ALLTOALL,
            (output, source),
            source_at,
            at,
            0,
            kind,
            0,
            0,
            [c * element for c in send],
            [c * element for c in receive],
            label,
            timeout,
            asynchronous,
        )

    def send(self, array: Any, member: int, tag: int = 0, form: str = "") -> Pending:
        """Begin to send `array` to member number `member`. Both must name the same type, and the same `form`.

        Tags are numbers below 2**32; the runtime itself uses the eight highest. It arrives, also where nobody
        keeps or waits for what this returns.
        """
        at, count, kind = locate(array)
        self._unfinished.sweep()
        request = self._group.send(member, at, count * SIZES[kind], tag, _signature(kind, form))
        return Pending(request, (array,), self._unfinished)

    def receive(self, array: Any, member: int, tag: int = 0, form: str = "") -> Pending:
        """Begin to receive into `array` what member number `member` sends with the same tag."""
        at, count, kind = locate(array)
        signature = _signature(kind, form)
        return Pending(self._group.receive(member, at, count * SIZES[kind], tag, signature), (array,))

    def receive_any(self, array: Any, tag: int = 0, form: str = "") -> "FromAny":
        """Receive into `array` what comes first with this tag; what this returns knows the member."""
        return FromAny(self, array, tag, form)

    def receive_if_sent(self, array: Any, tag: int, form: str, timeout: int) -> tuple[int, Pending] | None:
        """Begin to receive from a member that has sent, and which one that is; None: none until `timeout`."""
        if self._group.sender(tag, timeout) < 0:
            return None
        with self._choosing:  # no two receives count on one message
            member = self._group.sender(tag, 0)
            return None if member < 0 else (member, self.receive(array, member, tag, form))

    def _parts(self, name: str, total: int, counts: Sequence[int] | None) -> list[int]:
        if counts is None:
            counts = [total // self.size] * self.size
        if len(counts) != self.size or sum(counts) != total or min(counts) < 0:
            raise InvalidCall(
                f"The {name} of alltoall has {total} elements, which {list(counts)} does not divide among "
                f"{self.size} members.",
                "Give one count per member that together make up the whole.",
            )
        return list(counts)

    def _call(
        self,
        kind: int,
        buffers: tuple[Any, ...],
        source: int,
        output: int,
        count: int,
        element: int,
        reduction: int = 0,
        root: int = 0,
        send_sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
        label: str = "",
        timeout: int = -1,
        asynchronous: bool = False,
        wire: int = 0,
    ) -> Pending | None:
        if asynchronous and self._unfinished.held:
            self._unfinished.sweep()
        call = self._group.submit if asynchronous else self._group.execute
        began = time.perf_counter() if profile.recorder else 0.0
        handle = call(
            kind,
            source,
            output,
            count,
            element,
            reduction,
            root,
            send_sizes,
            receive_sizes,
            label,
            timeout,
            wire,
        )
        if profile.recorder is None:
            return Pending(handle, buffers, self._unfinished) if asynchronous else None
        name, size = _NAMES[kind], _size(buffers[0]) if buffers else 0
        if asynchronous:
            return Pending(handle, buffers, self._unfinished, name, size, self._recorded)
        profile.recorder.add(profile.WAITING, name, began)
        profile.recorder.add(profile.COLLECTIVE, name, began, size, recorded=self._recorded)
        return None


def _signature(kind: int, form: str) -> int:
    """What both ends of a message compare besides its size."""
    return zlib.crc32(f"{kind} {form}".encode()) % 2**31


def _with_shape(label: str, array: Any) -> str:
    """What the core compares: the label, and the shape where there are several dimensions."""
    dimensions = getattr(array, "shape", ())
    if len(dimensions) < 2:
        return label
    return f"{label} {forms.shape(tuple(dimensions))}".strip()


def _size(buffer: Any) -> int:
    """Bytes of a buffer."""
    _, count, kind = locate(buffer)
    return count * SIZES[kind]


def operation(op: str) -> int:
    """The core's number of a reduction."""
    try:
        return OPERATIONS[op]
    except KeyError:
        raise InvalidCall(f"There is no reduction '{op}'.", f"Choose from {', '.join(OPERATIONS)}.") from None


def wire_type(wire: str) -> int:
    """The core's number of a wire type."""
    try:
        return WIRES[wire]
    except KeyError:
        raise InvalidCall(
            f"There is no wire type '{wire}'.", "Choose bf16 or int8, or leave it out."
        ) from None


def locate(array: Any) -> tuple[int, int, int]:
    """Address, number of elements and type of a contiguous array or tensor in host memory, or a bytearray."""
    pointer = getattr(array, "data_ptr", None)
    if pointer is not None:  # torch, which need not be installed
        if array.device.type != "cpu" or not array.is_contiguous():
            raise InvalidCall("A tensor is not contiguous host memory.", "Use tensor.cpu().contiguous().")
        at, count, name = pointer(), array.numel(), str(array.dtype)[6:]
    elif isinstance(array, bytearray):
        at, count, name = ctypes.addressof(ctypes.c_char.from_buffer(array)), len(array), "uint8"
    else:
        if not array.flags.c_contiguous:
            raise InvalidCall("An array is not contiguous.", "Use numpy.ascontiguousarray.")
        at, count, name = array.ctypes.data, array.size, array.dtype.name
    kind = TYPES.get(name)
    if kind is None:
        raise InvalidCall(
            f"Elements of type {name} cannot be sent.", f"Convert to one of {', '.join(TYPES)}."
        )
    return at, count, kind
