"""The collectives of `torch.distributed` on GPU tensors.

Where each rank has a GPU of its own and PyTorch has NCCL, NCCL carries them. Else (ranks that share a GPU, a
PyTorch without NCCL) they are staged through pinned host memory: a thread of the group copies, reduces and
copies back in the order of the calls, so that the caller's kernels run on meanwhile.
"""

# As in backend.py; and the stubs of futures are wrong about set_exception.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportMissingImports=false
# pyright: reportArgumentType=false, reportPrivateImportUsage=false

import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall, Timeout
from carme_runtime.torch.backend import ProcessGroupCarme
from carme_runtime.torch.flat import form_of, stated_form, stating, tensors_in
from carme_runtime.torch.staging import Chunks, passes_in_chunks
from carme_runtime.torch.works import milliseconds

__all__ = ["GpuProcessGroup"]

_ENDING_SECONDS = 3.0

#: Collectives by their names here, with the names that NCCL's group has had for them, and whether it matters
#: what the first argument holds beforehand.
_COLLECTIVES: dict[str, tuple[tuple[str, ...], bool]] = {
    "allreduce": (("allreduce",), True),
    "allreduce_coalesced": (("allreduce_coalesced",), True),
    "reduce": (("reduce",), True),
    "broadcast": (("broadcast",), True),
    "allgather": (("allgather",), False),
    "all_gather_single": (("all_gather_single", "_allgather_base"), False),
    "all_gather_single_coalesced": (
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        False,
    ),
    "allgather_coalesced": (("allgather_coalesced",), False),
    "reduce_scatter": (("reduce_scatter",), False),
    "reduce_scatter_single": (("reduce_scatter_single", "_reduce_scatter_base"), False),
    "reduce_scatter_single_coalesced": (
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        False,
    ),
    "gather": (("gather",), False),
    "scatter": (("scatter",), False),
    "alltoall": (("alltoall",), False),
    "all_to_all_single": (("all_to_all_single", "alltoall_base"), False),
    "send": (("send",), True),
    "recv": (("recv",), False),
}
_ALIASES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


class StagedWork(dist.Work):
    """A collective on GPU tensors that goes through host memory."""

    def __init__(self, group: ProcessGroupCarme, results: list[torch.Tensor], limit: float | None) -> None:
        super().__init__()
        self._group, self._results, self._limit = group, results, limit
        self._over = threading.Event()
        self._copied: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def conclude(self, copied: "torch.cuda.Event | None", error: BaseException | None) -> None:
        """Called by the group's thread: the copies back are under way, or something went wrong."""
        self._copied, self._error = copied, error
        self._over.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for the result. Raises what went wrong."""
        if not self._over.wait(timeout.total_seconds() or self._limit):
            raise Timeout("A collective on GPU tensors was not over in time.", "Wait longer.")
        if self._error is not None:
            raise self._error
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        return True

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, copies included."""
        return self._over.is_set() and (self._copied is None or self._copied.query())

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result, once they do."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._results

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":  # pyright: ignore
        """Completed when the result is in place, by a thread that may wait for more collectives meanwhile."""
        if self._future is None:
            # It refuses tensors of devices that it does not know.
            devices = {tensor.device for tensor in self._results if tensor.is_cuda}
            self._future = torch.futures.Future(devices=list(devices))
            self._group.complete_later(self, self._future)
        return self._future


class GpuProcessGroup(ProcessGroupCarme):
    """A group on a machine with GPUs: host tensors as ever, GPU tensors over NCCL or staged.

    Args:
        context: The core's.
        group: For host tensors.
        staging: The same members again, for staged tensors: calls of two threads must not mix in one group.
        ranks: The members' numbers in the context.
        timeout: For each collective.
        store: Where NCCL's members find each other.
    """

    def __init__(
        self,
        context: Any,
        group: Group,
        staging: Group,
        ranks: list[int],
        timeout: timedelta,
        store: Any,
    ) -> None:
        super().__init__(context, group, ranks, timeout)
        self._staging, self._ranks, self._store = staging, ranks, store
        self._nccl: Any = None
        self._announced = False  # the others, where this rank's GPU is
        self._apart: dict[int | None, bool] = {}  # whether all members, or this one and another, share none
        self._orders: queue.SimpleQueue[Callable[[ProcessGroupCarme], None] | None] = queue.SimpleQueue()
        self._stager: threading.Thread | None = None
        self._chunks: dict[torch.device, Chunks] = {}

    def shutdown(self) -> None:
        """Let go of the threads and of NCCL."""
        super().shutdown()
        if self._stager:
            self._orders.put(None)
            self._stager.join(_ENDING_SECONDS)
            if not self._stager.is_alive():  # else it waits for a rank that does not come
                for chunks in self._chunks.values():
                    chunks.close()
            self._chunks.clear()
            self._stager = None
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None

    def over_gpus(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """One collective on GPU tensors."""
        device = next(tensor.device for tensor in tensors_in(arguments) if tensor.is_cuda)
        names, matters = _COLLECTIVES[name]
        peer = arguments[1] if name in ("send", "recv") else None
        if nccl := self._with_nccl(device, peer):
            method = next(getattr(nccl, candidate) for candidate in names if hasattr(nccl, candidate))
            return method(*arguments, **keywords)
        return self._staged(name, matters, device, arguments, keywords)

    def _with_nccl(self, device: torch.device, peer: int | None) -> Any:
        """NCCL's group, if all members have a GPU of their own, or this one and `peer` have.

        Those come here, and each reports where its GPU is before it looks for the others.
        """
        if not self._announced:
            self._announced = True
            properties = torch.cuda.get_device_properties(device)
            place = f"{socket.gethostname()} {getattr(properties, 'uuid', device.index)}"
            self._store.set(f"carme-gpu-{self.rank()}", place)
        if peer not in self._apart:
            members = range(self.size()) if peer is None else (self.rank(), peer)
            places = {self._store.get(f"carme-gpu-{member}") for member in members}
            self._apart[peer] = len(places) == len(members)
        if not (self._apart[peer] and dist.is_nccl_available()):
            return None
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = dist.PrefixStore("carme-nccl", self._store)
            self._nccl = dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)
        return self._nccl

    def _staged(
        self,
        name: str,
        matters: bool,
        device: torch.device,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> StagedWork:
        if torch.cuda.is_current_stream_capturing():
            raise InvalidCall(
                "A collective on GPU tensors goes through host memory here. A CUDA graph cannot record that.",
                "Give each rank a GPU of its own, so that NCCL carries it, or leave the graph out.",
            )
        if self._stager is None:
            self._stager = threading.Thread(target=self._stage, daemon=True, name="carme-staging")
            self._stager.start()
        limit = self._timeout.total_seconds()
        results = list(tensors_in(arguments[:1]))
        work = StagedWork(self, results, limit if limit > 0 else None)
        op = passes_in_chunks(name, arguments)
        wholes = [tensor.detach().contiguous() for tensor in results] if op else []
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(device))
        call = _Call(name, matters, device, arguments, keywords, before, stated_form())

        def order(host: ProcessGroupCarme) -> None:
            try:
                with torch.no_grad(), torch.cuda.device(device):
                    copied = self._in_chunks(call, op, results, wholes) if op else _as_a_whole(host, call)
                work.conclude(copied, None)
            except BaseException as error:
                work.conclude(None, error)

        self._orders.put(order)
        return work

    def _in_chunks(
        self, call: "_Call", op: str, results: list[torch.Tensor], wholes: list[torch.Tensor]
    ) -> "torch.cuda.Event | None":
        """Sum tensors piece by piece; `wholes` are the results, or contiguous copies of them."""
        arguments, copied = call.arguments, None
        requested = milliseconds(getattr(arguments[1], "timeout", timedelta(0))) if arguments[1:] else -1
        timeout = requested if requested > 0 else self.limit
        chunks = self._chunks_for(call.device)
        for tensor, whole in zip(results, wholes, strict=True):
            label = call.form if call.form is not None else form_of(tensor, tensor.dtype)
            copied = chunks.reduce(whole, op, self._staging, label, timeout, call.before)
            if whole.data_ptr() != tensor.data_ptr():
                copied = chunks.bring(tensor, whole)
        return copied

    def _chunks_for(self, device: torch.device) -> Chunks:
        if device not in self._chunks:
            self._chunks[device] = Chunks(device, self.context)
        return self._chunks[device]

    def _stage(self) -> None:
        """The thread that carries out staged collectives, one after the other."""
        host = ProcessGroupCarme(self.context, self._staging, self._ranks, self._timeout)
        while (order := self._orders.get()) is not None:
            order(host)
            del order


@dataclass
class _Call:
    """A collective on GPU tensors, as the program called it.

    Attributes:
        matters: Whether it matters what the first argument holds beforehand.
        before: The arguments are there when this has passed.
        form: What the ranks compare, where the program stated it.
    """

    name: str
    matters: bool
    device: torch.device
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    before: torch.cuda.Event
    form: str | None


def _as_a_whole(host: ProcessGroupCarme, call: _Call) -> torch.cuda.Event:
    """Carry out a collective on copies in host memory. Returns what has passed when the copies are back."""
    stream, arguments = _side_stream(call.device), call.arguments
    with torch.cuda.stream(stream):
        stream.wait_event(call.before)
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        first = _on_host(arguments[0], stream, back, call.matters)
        rest = [_on_host(argument, stream, [], True) for argument in arguments[1:]]
        stream.synchronize()
        with stating(call.form):
            begun = getattr(ProcessGroupCarme, call.name)(host, first, *rest, **call.keywords)
        begun.wait()
        # Whose content stays is not written to: autograd would take it for changed.
        sends = call.name == "send" or (call.name == "broadcast" and arguments[1].rootRank == host.rank())
        for tensor, twin in [] if sends else back:
            tensor.copy_(twin, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
    return copied


def _dispatching(name: str) -> Callable[..., Any]:
    on_host = getattr(ProcessGroupCarme, name)

    def collective(self: GpuProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_in(arguments)):
            return self.over_gpus(name, arguments, keywords)
        return on_host(self, *arguments, **keywords)

    collective.__name__, collective.__doc__ = name, on_host.__doc__
    return collective


for _name in _COLLECTIVES:
    setattr(GpuProcessGroup, _name, _dispatching(_name))
for _alias, _name in _ALIASES.items():
    setattr(GpuProcessGroup, _alias, getattr(GpuProcessGroup, _name))


def _on_host(
    argument: Any, stream: torch.cuda.Stream, back: list[tuple[torch.Tensor, torch.Tensor]], matters: bool
) -> Any:
    """The argument with pinned host tensors in place of those of a GPU; `back` collects the pairs."""
    if isinstance(argument, torch.Tensor):
        if not argument.is_cuda:
            return argument
        twin = torch.empty(argument.shape, dtype=argument.dtype, pin_memory=True)
        if matters:
            twin.copy_(argument, non_blocking=True)
        # The caching allocator must not hand the memory out again while this stream uses it.
        argument.record_stream(stream)
        back.append((argument, twin))
        return twin
    if isinstance(argument, list):
        return [_on_host(part, stream, back, matters) for part in argument]
    return argument


_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(device)
    return _streams[index]
