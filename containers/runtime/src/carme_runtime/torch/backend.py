"""The collectives of `torch.distributed` on host tensors; `gpus` adds those on GPU tensors."""

# torch calls these methods by position, with arguments that its own stubs name in several ways; and it
# need not be installed where this is checked.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportMissingImports=false

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime import hangs
from carme_runtime.collectives import Group, Pending, forms
from carme_runtime.torch import flat, monitored, sparse
from carme_runtime.torch.flat import (
    all_of,
    assign,
    check_host,
    check_types,
    form_of,
    form_of_all,
    size_of,
)
from carme_runtime.torch.works import (
    CarmeWork,
    MessageWork,
    WorkFromAny,
    complete,
    completes_here,
    milliseconds,
)

NAME = "carme"


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
        own_rank = group.ranks[group.index]
        super().__init__(ranks.index(own_rank), len(ranks))  # pyright: ignore[reportCallIssue]
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
        """What `setGroupName` was given."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """For people."""
        self._description = description

    def getGroupDesc(self) -> str:
        """What `setGroupDesc` was given."""
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
        if completes_here():
            alone: queue.SimpleQueue[tuple[dist.Work, Any] | None] = queue.SimpleQueue()
            alone.put((work, future))
            alone.put(None)
            threading.Thread(target=complete, args=(alone,), daemon=True).start()
            return
        if self._completer is None:
            self._completer = threading.Thread(target=complete, args=(self._later,), daemon=True)
            self._completer.start()
        self._later.put((work, future))

    def another_group(self) -> tuple[Any, Group]:
        """The core's context, and a group of the same members for calls in an order of their own."""
        return self.context, Group(self.context, self._group.ranks, self.limit)

    @property
    def limit(self) -> int:
        """Milliseconds after which a collective is given up; -1: never."""
        return milliseconds(self._timeout)

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
        if any(tensor.layout != torch.strided for tensor in tensors):
            return self._joined([self._add_sparse(tensor, opts) for tensor in tensors], None, tensors)
        pending, finishers = [], []
        name, factor = flat.reduction(opts, *tensors)
        for tensor in tensors:
            whole, op, finish = flat.reducible(tensor, name, self.size())
            if factor is not None:
                whole.mul_(factor)
            form = form_of(tensor, whole.dtype)
            pending.append(self._begin(self._group.allreduce, whole, op, form, opts=opts))
            finishers.append(finish)
        return CarmeWork(self, pending, tensors, all_of(finishers))

    def _add_sparse(self, tensor: torch.Tensor, opts: Any) -> CarmeWork:
        name, factor = flat.reduction(opts, tensor)
        sparse.check_operation(name)
        form = sparse.form_of(tensor)

        def gather(into: list[torch.Tensor], part: torch.Tensor) -> CarmeWork:
            with flat.stating(form):
                return self.allgather([into], [part], opts)

        divisor = self.size() if name == "mean" else 1 if factor is None else 1 / factor
        works, result = sparse.begin(tensor, self.size(), divisor, gather)

        def finish() -> None:
            tensor.copy_(result())

        return self._joined(works, finish, [tensor])

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
            whole, finish = flat.bytes_of(tensor)
            pending.append(self._begin(self._group.broadcast, whole, root, form_of(tensor), opts=opts))
            finishers.append(finish)
        return CarmeWork(self, pending, tensors, all_of(finishers))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> CarmeWork:
        """Collect the tensors of all members; their sizes may differ."""
        pending, finishers = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            work, finish = self._gather(output, tensor, opts)
            pending.append(work)
            finishers.append(finish)
        return CarmeWork(self, pending, outputs[0], all_of(finishers))

    def _gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, opts: Any
    ) -> tuple[Pending, Callable[[], None]]:
        check_host(tensor, *outputs)
        check_types(tensor, *outputs)
        source = flat.flat(tensor)
        by_member = [outputs[self._members.index(m)] for m in range(len(self._members))]
        counts = [size_of(output) for output in by_member]
        room = torch.empty(sum(counts), dtype=torch.uint8)

        def finish() -> None:
            for output, part in zip(by_member, room.split(counts), strict=True):
                assign(output, part.view(output.dtype))

        work = self._begin(self._group.allgather, room, source, counts, form_of_all(by_member), opts=opts)
        return work, finish

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> CarmeWork:
        """Collect equal tensors of all members in one."""
        check_host(output, tensor)
        check_types(output, tensor)
        if output.is_contiguous() and self._in_order:
            whole, part, form = flat.flat(output), flat.flat(tensor), form_of(tensor)
            pending = self._begin(self._group.allgather, whole, part, None, form, opts=opts)
            return CarmeWork(self, [pending], [output])
        room = torch.empty(output.numel(), dtype=output.dtype)
        # Each part in the shape of the others' tensors, which they compare.
        parts = list(room.chunk(self.size()))
        if room.numel() == tensor.numel() * self.size():
            parts = [part.view(tensor.shape) for part in parts]
        work, finish = self._gather(parts, tensor, opts)
        return CarmeWork(self, [work], [output], all_of([finish, lambda: assign(output, room)]))

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
                self.reduce_scatter_single(
                    o, torch.cat([part.reshape(-1) for part in i]), opts, form_of_all(i)
                )
                if all(part.numel() == o.numel() for part in i)
                else self._reduce_scatter_uneven(o, i, opts)
                for o, i in zip(outputs, inputs, strict=True)
            ]
        )

    def _reduce_scatter_uneven(self, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> CarmeWork:
        whole = torch.cat([part.reshape(-1) for part in parts])
        with flat.stating(form_of_all(parts)):
            work = self._reduce_all([whole], opts)
        begin = sum(part.numel() for part in parts[: self.rank()])

        def finish() -> None:
            assign(output, whole[begin : begin + output.numel()])

        return self._joined([work], finish, [output])

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None, form: str | None = None
    ) -> CarmeWork:
        """Reduce one tensor, keep this member's block. `form`: what ranks compare instead of its shape."""
        check_host(output, tensor)
        check_types(output, tensor)
        if form is None:
            form = form_of(tensor, tensor.dtype if tensor.dtype in flat.REDUCIBLE else torch.uint8)
        name, factor = flat.reduction(opts, tensor)
        if flat.averages_integers(tensor, name):
            return self._reduce_scatter_integers(output, tensor, opts, form)
        if factor is not None:
            tensor = tensor.detach() * factor
        if not self._in_order:
            blocks = tensor.reshape(self.size(), -1)
            tensor = torch.cat([blocks[self._members.index(m)] for m in range(self.size())])
        source, op, _ = flat.reducible(tensor, name, self.size())
        if source.data_ptr() == output.data_ptr():
            source = source.clone()
        if output.is_contiguous() and source.dtype == output.dtype:
            pending = self._begin(self._group.reduce_scatter, output.view(-1), source, op, form, opts=opts)
            return CarmeWork(self, [pending], [output])
        room = torch.empty(source.numel() // self.size(), dtype=source.dtype)
        pending = self._begin(self._group.reduce_scatter, room, source, op, form, opts=opts)
        return CarmeWork(self, [pending], [output], lambda: assign(output, room))

    def _reduce_scatter_integers(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any, form: str
    ) -> CarmeWork:
        """The mean of integers: their sum is divided and cut off."""
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        with flat.stating(form):
            work = self._reduce_all([whole], opts)
        block = output.numel()
        begin = self.rank() * block
        return self._joined([work], lambda: assign(output, whole.view(-1)[begin : begin + block]), [output])

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
        form = f"gather {form_of(inputs[0])}"
        into = outputs[0] if self.rank() == root else self._only(root, inputs[0].reshape(-1)[:0])
        return self.alltoall(into, self._only(root, inputs[0]), opts, form)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> CarmeWork:
        """Give each member its tensor of the root's."""
        root = opts.rootRank
        sends = list(inputs[0]) if self.rank() == root else self._only(root, outputs[0].reshape(-1)[:0])
        return self.alltoall(self._only(root, outputs[0]), sends, opts, f"scatter {form_of(outputs[0])}")

    def _only(self, member: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        empty = tensor.reshape(-1)[:0]
        return [tensor if m == member else empty for m in range(self.size())]

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
        form: str | None = None,
    ) -> CarmeWork:
        """Send the i-th tensor to member i. `form`: what ranks compare instead of the type."""
        check_host(*outputs, *inputs)
        check_types(*outputs, *inputs)
        form = flat.name_of(outputs[0].dtype) if form is None else form
        to = [inputs[self._members.index(m)] for m in range(self.size())]
        back = [outputs[self._members.index(m)] for m in range(self.size())]
        source = torch.cat([flat.flat(tensor) for tensor in to])
        counts = [size_of(tensor) for tensor in back]
        room = torch.empty(sum(counts), dtype=torch.uint8)

        def finish() -> None:
            for output, part in zip(back, room.split(counts), strict=True):
                assign(output, part.view(output.dtype))

        sends = [size_of(tensor) for tensor in to]
        pending = self._begin(self._group.alltoall, room, source, counts, sends, form, opts=opts)
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
        # Ranks may have different numbers of rows.
        form = f"{flat.name_of(output.dtype)} {forms.row(tuple(output.shape))}"
        return self._joined([self.alltoall(outputs, inputs, opts, form)], None, [output])

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
        limit = milliseconds(self._timeout if timeout is None else timeout)
        monitored.wait_for_all(self._group, limit, wait_all_ranks)

    # Between two members

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> CarmeWork:
        """Send to one member."""
        check_host(*tensors)
        member = self._members[destination]
        pending = [
            self._group.send(flat.flat(tensor), member, tag % 2**32, flat.name_of(tensor.dtype))
            for tensor in tensors
        ]
        rank = self._group.ranks[member]
        return MessageWork(self, pending, tensors, f"Rank {rank} took no message in time.")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> CarmeWork:
        """Receive from one member."""
        member = self._members[source]
        pending, finishers = [], []
        for tensor in tensors:
            whole, finish = flat.bytes_of(tensor)
            kind = flat.name_of(tensor.dtype)
            pending.append(self._group.receive(whole, member, tag % 2**32, kind))
            finishers.append(finish)
        late = f"No message came from rank {self._group.ranks[member]} in time."
        return MessageWork(self, pending, tensors, late, all_of(finishers))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> CarmeWork:
        """Receive one tensor from whichever member sends first."""
        (tensor,) = tensors
        whole, finish = flat.bytes_of(tensor)
        pending = self._group.receive_any(whole, tag % 2**32, flat.name_of(tensor.dtype))

        def source() -> int:
            assert pending.member is not None
            return self._members.index(pending.member)

        return WorkFromAny(self, [pending], tensors, finish, source)

    def _begin(self, method: Callable[..., Any], *arguments: Any, opts: Any) -> Pending:
        requested = milliseconds(getattr(opts, "timeout", timedelta(0)))
        timeout = requested if requested > 0 else milliseconds(self._timeout)
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
