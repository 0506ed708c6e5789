"""The collectives of `torch.distributed` on host tensors; `gpus` adds those on GPU tensors."""

# torch calls these methods by position, with arguments that its own stubs name in several ways; and it
# need not be installed where this is checked.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportMissingImports=false

import contextlib
import functools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from carme_runtime import hangs
from carme_runtime.collectives import Group, Pending
from carme_runtime.collectives.errors import InvalidCall, Timeout
from carme_runtime.gaspi import rendezvous
from carme_runtime.gaspi.joining import join
from carme_runtime.torch import monitored

NAME = "carme"
OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
}
REDUCIBLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
_JOIN_SECONDS = 600.0
_WAITING_IN = str(Path(dist.__file__).parent) + os.sep
_contexts: list[Any] = []  # the core's, which others may need until this process ends


def register() -> None:
    """Make the backend known to torch. Does nothing when it is known already."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _offer_monitored_barrier()


def _offer_monitored_barrier() -> None:
    """torch's function refuses all groups but Gloo's; let it take those of this backend, too."""
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, ProcessGroupCarme):
            return original(group, timeout, wait_all_ranks)
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        return chosen.monitored_barrier(timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def _create(options: Any, _: Any) -> "ProcessGroupCarme":
    world = dist.group.WORLD  # None while this makes it
    timeout: timedelta = options.timeout
    seconds = hangs.limit()
    alone = not isinstance(world, ProcessGroupCarme)
    if alone:
        # Beside a group of another backend the members join each other, and count themselves.
        ranks = list(range(options.group_size))
        context = _join(options.store, options.group_rank, options.group_size, timeout)
        if world is None:  # those of a run that this process has left
            _contexts.clear()
        _contexts.append(context)
    else:
        ranks, context = list(options.global_ranks_in_group), world.context
    group = Group(context, ranks, _milliseconds(timeout))
    if not torch.cuda.is_available():
        made = ProcessGroupCarme(context, group, ranks, timeout)
    else:
        from carme_runtime.torch.gpus import GpuProcessGroup

        staging = Group(context, ranks, _milliseconds(timeout))
        made = GpuProcessGroup(context, group, staging, ranks, timeout, options.store)
    if alone:
        made.watch = hangs.watch(made, group, seconds, (_WAITING_IN,))
    return made


def _join(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    def exchange(entry: rendezvous.Entry) -> list[rendezvous.Entry]:
        store.set(f"rank{rank}", json.dumps(entry))
        return [json.loads(store.get(f"rank{r}")) for r in range(size)]

    key_file = os.environ.get("CARME_KEY_FILE")
    return join(
        rank,
        size,
        exchange,
        rendezvous.read_key(key_file) if key_file else None,
        os.environ.get("CARME_ADDRESS"),
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        min(timeout.total_seconds(), _JOIN_SECONDS),
    )


class CarmeWork(dist.Work):
    """A collective under way; `finish` brings its result to where the caller wants it."""

    def __init__(
        self,
        group: "ProcessGroupCarme",
        pending: Sequence[Pending],
        results: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._group = group
        self._pending = list(pending)
        self._results = results
        self._finish = finish
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is over. Raises what went wrong."""
        limit = _milliseconds(timeout)
        end = time.monotonic() + limit / 1000
        # Another thread may wait in here, for longer.
        over = self._lock.acquire(timeout=-1 if limit < 0 else min(limit / 1000, threading.TIMEOUT_MAX))
        if over:
            try:
                over = self._over or self._await(-1 if limit < 0 else end)
            finally:
                self._lock.release()
        if not over:
            raise Timeout("A collective was not over in time.", "Wait longer.")
        if self._error:
            raise self._error
        return True

    def _await(self, end: float) -> bool:
        """Wait until it is over, or until `end`, -1: for ever; whether it is over."""
        try:
            for pending in self._pending:
                left = -1 if end < 0 else max(int((end - time.monotonic()) * 1000), 0)
                if not pending.wait(left):
                    return False
            if self._finish:
                self._finish()
        except BaseException as error:
            self._conclude(error)
            raise
        self._conclude(None)
        return True

    def _conclude(self, error: BaseException | None) -> None:
        self._over, self._error = True, error
        self._pending.clear()

    def is_completed(self) -> bool:
        """Whether it is over; then its result is where it belongs."""
        if not self._over and all(pending.done() for pending in self._pending):
            with contextlib.suppress(Exception):  # `exception` tells it
                self.wait()
        return self._over

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong; None where nothing did, or it is not over."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._results

    def synchronize(self) -> None:
        """The same as wait, for host tensors."""
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":  # pyright: ignore
        """Completed, by a thread of the group, when this is over."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._group.complete_later(self, self._future)
        return self._future


class ProcessGroupCarme(dist.ProcessGroup):
    """What `torch.distributed` calls.

    Args:
        context: The core's.
        group: The core's, of all members.
        ranks: The members' numbers in the context, in torch's order.
        timeout: For each collective.
    """

    def __init__(self, context: Any, group: Group, ranks: list[int], timeout: timedelta) -> None:
        # The core sorts its members, torch keeps the order in which they were named.
        mine = group.ranks[group.index]
        super().__init__(ranks.index(mine), len(ranks))  # pyright: ignore[reportCallIssue]
        self.context = context
        self._group = group
        self._members = [group.ranks.index(rank) for rank in ranks]
        self._in_order = self._members == list(range(len(ranks)))
        self._timeout = timeout
        self._later: queue.SimpleQueue[tuple[dist.Work, Any] | None] = queue.SimpleQueue()
        self._completer: threading.Thread | None = None
        self._name = self._description = ""
        self.watch: hangs.Watch | None = None

    def getBackendName(self) -> str:
        """The name of the backend."""
        return NAME

    # torch keeps these for groups that have backends of their own, and asks groups like this one for them.

    def setGroupName(self, name: str) -> None:
        """Under which torch finds the group again."""
        self._name = name

    def getGroupName(self) -> str:
        """What `setGroupName` was told."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """For people."""
        self._description = description

    def getGroupDesc(self) -> str:
        """What `setGroupDesc` was told."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """Whose tensors it takes: torch looks for the host here before it saves in the background."""
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def complete_later(self, work: dist.Work, future: Any) -> None:
        """Set `future` as soon as `work` is over.

        One thread does it for one future after the other, with what is called then. What that begins itself
        has a thread of its own, as it may wait for it: PowerSGD's hook does.
        """
        if getattr(_completing, "here", False):
            alone: queue.SimpleQueue[tuple[dist.Work, Any] | None] = queue.SimpleQueue()
            alone.put((work, future))
            alone.put(None)
            threading.Thread(target=_complete, args=(alone,), daemon=True).start()
            return
        if self._completer is None:
            self._completer = threading.Thread(target=_complete, args=(self._later,), daemon=True)
            self._completer.start()
        self._later.put((work, future))

    def another_group(self) -> tuple[Any, Group]:
        """The core's context, and a group of the same members for calls in an order of their own."""
        return self.context, Group(self.context, self._group.ranks, self.limit)

    @property
    def limit(self) -> int:
        """Milliseconds after which a collective is given up; -1: never."""
        return _milliseconds(self._timeout)

    def shutdown(self) -> None:
        """Let go of the completing thread; the core's group goes with this object."""
        if self.watch:
            self.watch.stop()
            self.watch = None
        if self._completer:
            self._later.put(None)
            self._completer = None

    def abort(self) -> None:
        """The same as shutdown."""
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """For collectives that begin from now on."""
        self._timeout = timeout

    # Collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None, *_: Any) -> CarmeWork:
        """Reduce in place."""
        return self._reduce_all(tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> CarmeWork:
        """Reduce several tensors in place."""
        return self._reduce_all(tensors, opts)

    def _reduce_all(self, tensors: list[torch.Tensor], opts: Any) -> CarmeWork:
        pending, finishers = [], []
        name, factor = _reduction(opts, *tensors)
        for tensor in tensors:
            flat, op, finish = _reducible(tensor, name)
            if factor is not None:
                flat.mul_(factor)
            pending.append(self._begin(self._group.allreduce, flat, op, opts=opts))
            finishers.append(finish)
        return CarmeWork(self, pending, tensors, _all(finishers))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> CarmeWork:
        """Reduce to one member; what the others hold does not change."""
        if self.rank() == opts.rootRank:
            return self._reduce_all(tensors, opts)
        return self._reduce_all([tensor.clone() for tensor in tensors], opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> CarmeWork:
        """Give all members the root's tensor."""
        pending, finishers = [], []
        root = self._members[opts.rootRank]
        for tensor in tensors:
            flat, finish = _bytes(tensor)
            pending.append(self._begin(self._group.broadcast, flat, root, opts=opts))
            finishers.append(finish)
        return CarmeWork(self, pending, tensors, _all(finishers))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> CarmeWork:
        """Collect the tensors of all members; their sizes may differ."""
        pending, finishers = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            work, finish = self._gather(output, tensor, opts)
            pending.append(work)
            finishers.append(finish)
        return CarmeWork(self, pending, outputs[0], _all(finishers))

    def _gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, opts: Any
    ) -> tuple[Pending, Callable[[], None]]:
        _host(tensor, *outputs)
        source = _flat(tensor)
        by_member = [outputs[self._members.index(m)] for m in range(len(self._members))]
        counts = [_size(output) for output in by_member]
        room = torch.empty(sum(counts), dtype=torch.uint8)

        def finish() -> None:
            for output, part in zip(by_member, room.split(counts), strict=True):
                _assign(output, part.view(output.dtype))

        return self._begin(self._group.allgather, room, source, counts, opts=opts), finish

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> CarmeWork:
        """Collect equal tensors of all members in one."""
        _host(output, tensor)
        if output.is_contiguous() and self._in_order:
            pending = self._begin(self._group.allgather, _flat(output), _flat(tensor), opts=opts)
            return CarmeWork(self, [pending], [output])
        room = torch.empty(output.numel(), dtype=output.dtype)
        work, finish = self._gather(list(room.chunk(self.size())), tensor, opts)
        return CarmeWork(self, [work], [output], _all([finish, lambda: _assign(output, room)]))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CarmeWork:
        """Several all_gather_single."""
        return self._joined(
            [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> CarmeWork:
        """Several allgather; `outputs` by member."""
        return self._joined(
            [
                self.allgather([[outputs[m][i] for m in range(self.size())]], [tensor], opts)
                for i, tensor in enumerate(inputs)
            ]
        )

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> CarmeWork:
        """Reduce, and keep this member's part."""
        return self._joined(
            [
                self.reduce_scatter_single(o, torch.cat([part.reshape(-1) for part in i]), opts)
                if all(part.numel() == o.numel() for part in i)
                else self._reduce_scatter_uneven(o, i, opts)
                for o, i in zip(outputs, inputs, strict=True)
            ]
        )

    def _reduce_scatter_uneven(self, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> CarmeWork:
        whole = torch.cat([part.reshape(-1) for part in parts])
        work = self._reduce_all([whole], opts)
        begin = sum(part.numel() for part in parts[: self.rank()])

        def finish() -> None:
            _assign(output, whole[begin : begin + output.numel()])

        return self._joined([work], finish, [output])

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> CarmeWork:
        """Reduce one tensor, and keep this member's block."""
        _host(output, tensor)
        name, factor = _reduction(opts, tensor)
        if factor is not None:
            tensor = tensor.detach() * factor
        if not self._in_order:
            blocks = tensor.reshape(self.size(), -1)
            tensor = torch.cat([blocks[self._members.index(m)] for m in range(self.size())])
        source, op, _ = _reducible(tensor, name)
        if source.data_ptr() == output.data_ptr():
            source = source.clone()
        if output.is_contiguous() and source.dtype == output.dtype:
            pending = self._begin(self._group.reduce_scatter, output.view(-1), source.view(-1), op, opts=opts)
            return CarmeWork(self, [pending], [output])
        room = torch.empty(source.numel() // self.size(), dtype=source.dtype)
        pending = self._begin(self._group.reduce_scatter, room, source.view(-1), op, opts=opts)
        return CarmeWork(self, [pending], [output], lambda: _assign(output, room))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CarmeWork:
        """Several reduce_scatter_single."""
        return self._joined(
            [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> CarmeWork:
        """Collect the tensors of all members on one."""
        root = opts.rootRank
        if self.rank() == root:
            return self.alltoall(outputs[0], self._only(root, inputs[0]), opts)
        return self.alltoall(self._only(root, inputs[0][:0]), self._only(root, inputs[0]), opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> CarmeWork:
        """Give each member its tensor of the root's."""
        root = opts.rootRank
        sends = list(inputs[0]) if self.rank() == root else self._only(root, outputs[0].reshape(-1)[:0])
        return self.alltoall(self._only(root, outputs[0]), sends, opts)

    def _only(self, member: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        nothing = tensor.reshape(-1)[:0]
        return [tensor if m == member else nothing for m in range(self.size())]

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CarmeWork:
        """Send the i-th tensor to member i."""
        _host(*outputs, *inputs)
        to = [inputs[self._members.index(m)] for m in range(self.size())]
        back = [outputs[self._members.index(m)] for m in range(self.size())]
        source = torch.cat([_flat(tensor) for tensor in to])
        counts = [_size(tensor) for tensor in back]
        room = torch.empty(sum(counts), dtype=torch.uint8)

        def finish() -> None:
            for output, part in zip(back, room.split(counts), strict=True):
                _assign(output, part.view(output.dtype))

        sends = [_size(tensor) for tensor in to]
        pending = self._begin(self._group.alltoall, room, source, counts, sends, opts=opts)
        return CarmeWork(self, [pending], outputs, finish)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> CarmeWork:
        """Send parts of one tensor, by rows, to the members."""
        outputs = list(output.split(output_splits or [output.shape[0] // self.size()] * self.size()))
        inputs = list(tensor.split(input_splits or [tensor.shape[0] // self.size()] * self.size()))
        return self._joined([self.alltoall(outputs, inputs, opts)], None, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> CarmeWork:
        """Wait for all members."""
        return CarmeWork(self, [self._begin(self._group.barrier, opts=opts)], [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False, *_: Any
    ) -> None:
        """Wait for all members, and say who did not come. The group can be used further when it fails.

        Args:
            timeout: None: that of the group.
            wait_all_ranks: Wait for the others although a member was lost, to name all that are missing.

        Raises:
            Timeout: members did not come, or came too late. Where only the first member's answer is missing,
                it is that one which is named.
            PeerLost: members were lost, and all others came or were not waited for.
        """
        limit = _milliseconds(self._timeout if timeout is None else timeout)
        monitored.wait_for_all(self._group, limit, wait_all_ranks)

    # Between two members

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> CarmeWork:
        """Send to one member."""
        _host(*tensors)
        member = self._members[destination]
        return CarmeWork(self, [self._group.send(_flat(t), member, tag % 2**32) for t in tensors], tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> CarmeWork:
        """Receive from one member."""
        pending, finishers = [], []
        for tensor in tensors:
            flat, finish = _bytes(tensor)
            pending.append(self._group.receive(flat, self._members[source], tag % 2**32))
            finishers.append(finish)
        return CarmeWork(self, pending, tensors, _all(finishers))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> CarmeWork:
        """Not offered."""
        raise InvalidCall(
            "The carme backend cannot receive from whichever rank sends first.", "Name the source of recv."
        )

    def _begin(self, method: Callable[..., Any], *arguments: Any, opts: Any) -> Pending:
        given = _milliseconds(getattr(opts, "timeout", timedelta(0)))
        timeout = given if given > 0 else _milliseconds(self._timeout)
        return method(*arguments, timeout=timeout, asynchronous=True)

    def _joined(
        self,
        works: list[CarmeWork],
        finish: Callable[[], None] | None = None,
        results: list[torch.Tensor] | None = None,
    ) -> CarmeWork:
        def wait() -> None:
            for work in works:
                work.wait()
            if finish:
                finish()

        pending = [pending for work in works for pending in work._pending]
        return CarmeWork(self, pending, results or [r for work in works for r in work.result()], wait)


_completing = threading.local()  # `here`: in a thread that completes futures


def _complete(later: "queue.SimpleQueue[tuple[dist.Work, Any] | None]") -> None:
    _completing.here = True
    while (item := later.get()) is not None:
        work, future = item
        try:
            work.wait()
            result = work.result()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del item, work, future


def _milliseconds(timeout: timedelta | None) -> int:
    if timeout is None or timeout.total_seconds() <= 0:
        return -1
    return max(int(timeout.total_seconds() * 1000), 1)


def _reduction(opts: Any, *tensors: torch.Tensor) -> tuple[str, float | None]:
    """The core's name of the reduction, and a factor that each member's part has before it."""
    op: Any = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    for known, name in OPERATIONS.items():
        if op == known:
            return name, None
    kind, factor = op.__getstate__()  # torch tells neither in another way
    if op == dist.ReduceOp.PREMUL_SUM:
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            raise InvalidCall("PREMUL_SUM was asked for of integers.", "Give floating-point numbers.")
        return "sum", float(factor)
    raise InvalidCall(
        f"The carme backend has no reduction {kind.name}.",
        f"Choose from {', '.join(OPERATIONS.values())}.",
    )


def _host(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise InvalidCall(
                f"A host tensor is needed here, and one on {tensor.device} was given.",
                "Give tensors of one device to a collective, on the host or on an NVIDIA GPU.",
            )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in place where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The bytes of a tensor, and what brings a changed copy of them back."""
    _host(tensor)
    flat = _flat(tensor)
    if tensor.is_contiguous():
        return flat, None
    return flat, lambda: _assign(tensor, flat.view(tensor.dtype))


def _assign(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(flat.view(tensor.shape))


def _reducible(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str, Callable[[], None] | None]:
    """A contiguous tensor of a type that the core reduces, the reduction, and what brings the result back."""
    _host(tensor)
    tensor = tensor.detach()
    if tensor.is_complex():
        if op not in ("sum", "mean"):
            raise InvalidCall(f"Complex numbers have no {op}.", "Use sum or mean.")
        return _reducible(torch.view_as_real(tensor), op)
    if tensor.dtype == torch.bool:
        op = {"sum": "max", "product": "min"}.get(op, op)
        copy = tensor.to(torch.uint8).contiguous()
    elif tensor.dtype in REDUCIBLE:
        if tensor.is_contiguous():
            return tensor.view(-1), op, None
        copy = tensor.contiguous()
    elif tensor.dtype in (torch.int8, torch.int16):
        copy = tensor.to(torch.int32).contiguous()
    else:
        raise InvalidCall(
            f"Elements of type {tensor.dtype} cannot be reduced.",
            f"Convert to one of {', '.join(str(kind)[6:] for kind in REDUCIBLE)}.",
        )
    return copy.view(-1), op, lambda: _assign(tensor, copy)


def _all(finishers: Sequence[Callable[[], Any] | None]) -> Callable[[], None] | None:
    present = [finish for finish in finishers if finish]
    if not present:
        return None

    def run() -> None:
        for finish in present:
            finish()

    return run
