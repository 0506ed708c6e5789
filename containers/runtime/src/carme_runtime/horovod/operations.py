"""Collectives on tensors, with handles."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.horovod.compression import Compression
from carme_runtime.horovod.world import world


class ReduceOp(enum.IntEnum):
    """How tensors are reduced."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp
TORCH_OPS = {
    Average: dist.ReduceOp.AVG,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

# What the journal calls them.
ALLREDUCE, BUCKET, BROADCAST, ALLGATHER, ALLTOALL, REDUCESCATTER, BARRIER = range(1, 8)
_NAMES = {4: "allgather", 3: "broadcast", 5: "alltoall", 6: "reducescatter", 7: "barrier"}


class _Handle:
    """An operation under way; `finish` makes its result."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], name: str | None) -> None:
        self.works, self._finish, self._name = works, finish, name

    def result(self) -> Any:
        try:
            for work in self.works:
                work.wait()
        except Mismatch as error:
            if not self._name:
                raise
            raise Mismatch(f"{self._name}: {error.message}", error.remedy) from None
        with torch.no_grad():
            return self._finish()


_handles: dict[int, _Handle] = {}
_numbers = itertools.count()


def _begun(works: Sequence[Any], finish: Callable[[], Any], name: str | None) -> int:
    number = next(_numbers)
    _handles[number] = _Handle(works, finish, name)
    return number


def poll(handle: int) -> bool:
    """Whether the operation is over, so that `synchronize` will not wait."""
    return all(work.is_completed() for work in _known(handle).works)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation, and return its result."""
    known = _known(handle)
    del _handles[handle]
    return known.result()


def _known(handle: int) -> _Handle:
    try:
        return _handles[handle]
    except KeyError:
        raise InvalidCall(
            f"There is no operation with handle {handle} under way.", "Synchronize each handle once."
        ) from None


def note(*entry: int) -> None:
    """Tell the ranks that have joined what this one begins."""
    journal = world().journal
    if journal:
        journal.note(*entry)


class _Differentiable(torch.autograd.Function):
    """An operation, and another one that its gradient goes through."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, run: Callable[[torch.Tensor], Any], back: Callable[..., torch.Tensor]
    ) -> Any:
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0].contiguous()), None, None


class _Grouped(torch.autograd.Function):
    """As `_Differentiable`, for an operation on several tensors that its gradients go through as well."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], *tensors: Any) -> Any:
        ctx.run = run
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *ctx.run([gradient.contiguous() for gradient in gradients])


# Allreduce


def _op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise InvalidCall("Both average and op were given.", "Give op alone.")
    if op is None:
        return Sum if average is False else Average
    try:
        return offered(ReduceOp(op))
    except ValueError:
        raise InvalidCall(
            f"There is no reduction {op!r}.", "Choose from Average, Sum, Min, Max and Product."
        ) from None


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        raise InvalidCall("A sparse tensor cannot be reduced.", "Give it dense: tensor.to_dense().")
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def offered(op: ReduceOp) -> ReduceOp:
    """`op` itself. Raises InvalidCall for Adasum, which scripts may name and not use."""
    if op == Adasum:
        raise InvalidCall(
            "There is no Adasum here.", "Use Average, or Horovod itself: carme-run --backend horovod."
        )
    return op


def _averages_integers(op: ReduceOp, tensor: torch.Tensor) -> bool:
    """Whether the mean over ranks is a sum that is divided afterwards, and cut off, as Horovod does it."""
    kind = tensor.dtype
    return op == Average and not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _begin(tensor: torch.Tensor, op: ReduceOp, prescale: float) -> ReduceOp:
    """Scale before the reduction, in place; what the ranks reduce with."""
    _scale(tensor, prescale)
    return Sum if _averages_integers(op, tensor) else op


def _end(tensor: torch.Tensor, op: ReduceOp, postscale: float) -> torch.Tensor:
    """Scale after the reduction, in place."""
    _scale(tensor, postscale)
    if _averages_integers(op, tensor):
        tensor.div_(world().size, rounding_mode="trunc")
    return tensor


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def _reduce(
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    name: str | None,
    finish: Callable[[], Any],
) -> int:
    """Begin to reduce `tensors` into `results`; those of one type and device travel together."""
    works, parts = [], []
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    with torch.no_grad():
        for members in kinds.values():
            if len(members) == 1:
                flat = results[members[0]].detach()
                if results[members[0]] is not tensors[members[0]]:
                    flat.copy_(tensors[members[0]])
            else:
                flat = torch.cat([tensors[index].detach().reshape(-1) for index in members])
                parts.append((flat, members))
            by = _begin(flat, op, prescale)
            note(ALLREDUCE, _dtype(flat), flat.numel(), int(by))
            works.append(dist.all_reduce(flat, TORCH_OPS[by], async_op=True))

    def end() -> Any:
        for flat, members in parts:
            sizes = [tensors[index].numel() for index in members]
            for index, part in zip(members, flat.split(sizes), strict=True):
                results[index].detach().copy_(part.view(results[index].shape))
        for result in results:
            _end(result.detach(), op, postscale)
        return finish()

    return _begun(works, end, name)


def _dtype(tensor: torch.Tensor) -> int:
    try:
        return _DTYPES.index(tensor.dtype)
    except ValueError:
        raise InvalidCall(
            f"Elements of type {tensor.dtype} cannot be sent.", "Convert to a common type, such as float32."
        ) from None


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce a tensor over all ranks; `synchronize` returns a new tensor."""
    result = _room_for(tensor)
    return _reduce(
        [tensor], [result], _op(average, op), prescale_factor, postscale_factor, name, lambda: result
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce a tensor over all ranks, in place."""
    return _reduce(
        [tensor], [tensor], _op(average, op), prescale_factor, postscale_factor, name, lambda: tensor
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """The tensor reduced over all ranks; its gradient is reduced the same way."""
    chosen = _op(average, op)

    def run(given: torch.Tensor) -> torch.Tensor:
        small, ctx = compression.compress(given)
        handle = allreduce_async(small, None, name, chosen, prescale_factor, postscale_factor)
        return compression.decompress(synchronize(handle), ctx)

    return _Differentiable.apply(tensor, run, run)  # pyright: ignore


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce several tensors as one; `synchronize` returns a list of new ones."""
    results = [_room_for(tensor) for tensor in tensors]
    return _reduce(
        tensors, results, _op(average, op), prescale_factor, postscale_factor, name, lambda: results
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce several tensors as one, in place."""
    held = list(tensors)
    return _reduce(held, held, _op(average, op), prescale_factor, postscale_factor, name, lambda: held)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors as one, in place."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor)
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Several tensors reduced over all ranks as one; their gradients are reduced the same way."""
    chosen = _op(average, op)

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        small = [compression.compress(tensor) for tensor in given]
        handle = grouped_allreduce_async(
            [tensor for tensor, _ in small], None, name, chosen, prescale_factor, postscale_factor
        )
        return [
            compression.decompress(result, ctx)
            for result, (_, ctx) in zip(synchronize(handle), small, strict=True)
        ]

    return list(_Grouped.apply(run, *tensors))  # pyright: ignore


# The others


def _tell(tensor: torch.Tensor) -> list[list[int]]:
    """Rows, elements of a row and type of all ranks' tensors; these may differ in rows alone."""
    mine = [tensor.shape[0], tensor[:1].numel() if tensor.shape[0] else -1, _dtype(tensor)]
    told = torch.empty(world().size, 3, dtype=torch.int64)
    dist.all_gather_into_tensor(told, torch.tensor([mine], dtype=torch.int64))
    rows: list[list[int]] = told.tolist()
    filled = [row for row in rows if row[1] >= 0]
    for row in rows:
        if row[2] != rows[0][2] or (row[1] >= 0 and row[1] != filled[0][1]):
            raise Mismatch(
                f"Rank {rows.index(row)} gave a tensor of {row[1]} elements to a row of type "
                f"{_DTYPES[row[2]]}, rank 0 one of {filled[0][1]} of type {_DTYPES[rows[0][2]]}.",
                "Give tensors of one type that differ in their first dimension alone.",
            )
    return rows


def _has_rows(what: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        raise InvalidCall(f"{what} got a tensor without dimensions.", "Give it one: tensor.reshape(1).")
    return tensor.detach().contiguous()


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> int:
    """Begin to lay the tensors of all ranks one after the other along their first dimension."""
    source = _has_rows("allgather", tensor)
    note(ALLGATHER)
    rows = [row[0] for row in _tell(source)]
    result = source.new_empty((sum(rows), *source.shape[1:]))
    work = dist.all_gather(list(result.split(rows)), source, async_op=True)
    return _begun([work], lambda: result, name)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The tensors of all ranks along the first dimension, in which they may differ."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient, op=Average)
        counts = torch.empty(world().size, dtype=torch.int64)
        dist.all_gather_into_tensor(counts, torch.tensor([tensor.shape[0]]))
        return mean.split(counts.tolist())[world().rank]

    return _Differentiable.apply(tensor, lambda given: synchronize(allgather_async(given, name)), back)  # pyright: ignore


def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None) -> int:
    """Begin to gather several tensors, each as `allgather_async` does; `synchronize` returns a list."""
    return _together([allgather_async(tensor, name) for tensor in tensors], name)


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None) -> list[torch.Tensor]:
    """Several tensors, each gathered as `allgather` does."""
    if _no_gradients(tensors):
        return synchronize(grouped_allgather_async(tensors, name))
    return [allgather(tensor, name) for tensor in tensors]


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Begin to give all ranks the root's tensor, in place."""
    if not 0 <= root_rank < world().size:
        raise InvalidCall(
            f"There is no rank {root_rank} among {world().size}.", "Choose a root_rank that there is."
        )
    note(BROADCAST)
    work = dist.broadcast(tensor.detach(), root_rank, async_op=True)
    return _begun([work], lambda: tensor, name)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Begin to give all ranks the root's tensor; `synchronize` returns a new one."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(copy, root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Give all ranks the root's tensor, in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The root's tensor."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient, op=Average)
        return mean if world().rank == root_rank else torch.zeros_like(mean)

    return _Differentiable.apply(  # pyright: ignore
        tensor, lambda given: synchronize(broadcast_async(given, root_rank, name)), back
    )


def alltoall_async(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None
) -> int:
    """Begin to send the i-th part of the rows to rank i."""
    source = _has_rows("alltoall", tensor)
    size = world().size
    if splits is None:
        if source.shape[0] % size:
            raise InvalidCall(
                f"alltoall got {source.shape[0]} rows, which {size} ranks cannot share evenly.",
                "Give splits.",
            )
        given = torch.full((size,), source.shape[0] // size, dtype=torch.int64)
    else:
        given = torch.as_tensor(splits, dtype=torch.int64).cpu().contiguous()
        if given.shape != (size,) or int(given.min()) < 0 or int(given.sum()) > source.shape[0]:
            raise InvalidCall(
                f"The splits {given.tolist()} do not divide {source.shape[0]} rows among {size} ranks.",
                "Give one number of rows for each rank.",
            )
    note(ALLTOALL)
    _tell(source)
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given)
    result = source.new_empty((int(received.sum()), *source.shape[1:]))
    sent = source[: int(given.sum())]
    work = dist.all_to_all_single(result, sent, received.tolist(), given.tolist(), async_op=True)
    return _begun([work], lambda: result if splits is None else (result, received.to(torch.int32)), name)


def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None
) -> Any:
    """What all ranks sent to this one; with `splits` also how many rows each did."""
    counts: list[torch.Tensor] = []

    def run(given: torch.Tensor) -> torch.Tensor:
        result = synchronize(alltoall_async(given, splits, name))
        if splits is None:
            return result
        counts.append(result[1])
        return result[0]

    def back(gradient: torch.Tensor) -> torch.Tensor:
        result = synchronize(alltoall_async(gradient, counts[0] if counts else None))
        return result[0] if counts else result

    output = _Differentiable.apply(tensor, run, back)
    return output if splits is None else (output, counts[0])  # pyright: ignore


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce a tensor over all ranks, of which each gets some rows: the first ranks one more."""
    source = _has_rows("reducescatter", tensor)
    chosen, (rank, size) = _op(None, op), (world().rank, world().size)
    rows = [source.shape[0] // size + (index < source.shape[0] % size) for index in range(size)]
    if prescale_factor != 1.0:
        source = source.clone()
    by = _begin(source, chosen, prescale_factor)
    result = source.new_empty((rows[rank], *source.shape[1:]))
    note(REDUCESCATTER)
    parts = list(source.split(rows))
    work = dist.reduce_scatter(result, parts, TORCH_OPS[by], async_op=True)
    return _begun([work], lambda: _end(result, chosen, postscale_factor), name)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the tensor reduced over all ranks."""

    def run(given: torch.Tensor) -> torch.Tensor:
        small, ctx = compression.compress(given)
        handle = reducescatter_async(small, name, op, prescale_factor, postscale_factor)
        return compression.decompress(synchronize(handle), ctx)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        whole = allgather(gradient * (prescale_factor * postscale_factor))
        return whole * world().size if op == Sum else whole

    return _Differentiable.apply(tensor, run, back)  # pyright: ignore


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce several tensors as `reducescatter_async` does; `synchronize` returns a list."""
    return _together(
        [reducescatter_async(tensor, name, op, prescale_factor, postscale_factor) for tensor in tensors], name
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Several tensors, each reduced and divided as `reducescatter` does."""
    if not _no_gradients(tensors):
        return [
            reducescatter(tensor, name, compression, op, prescale_factor, postscale_factor)
            for tensor in tensors
        ]
    small = [compression.compress(tensor) for tensor in tensors]
    handle = grouped_reducescatter_async(
        [tensor for tensor, _ in small], name, op, prescale_factor, postscale_factor
    )
    return [
        compression.decompress(result, ctx)
        for result, (_, ctx) in zip(synchronize(handle), small, strict=True)
    ]


def _together(handles: Sequence[int], name: str | None) -> int:
    """One handle in the place of several."""
    held = [_handles.pop(handle) for handle in handles]
    works = [work for one in held for work in one.works]
    return _begun(works, lambda: [one.result() for one in held], name)


def _no_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors)


def barrier() -> None:
    """Wait until all ranks have come here."""
    note(BARRIER)
    dist.barrier()


def join(device: int = -1) -> int:
    """This rank has no more data: until all ranks say so, it takes part in their allreduces with zeros.

    Args:
        device: Number of the GPU that the others' tensors are on; -1: the host.

    Returns:
        The rank that joined last.
    """
    here = world()
    if here.journal is None:
        return 0
    place = "cpu" if device < 0 else f"cuda:{device}"
    follower = here.journal.follow()
    while (entry := follower.next()) is not None:
        kind, first, second, third = entry
        if kind == ALLREDUCE:
            zeros = torch.zeros(second, dtype=_DTYPES[first], device=place)
            dist.all_reduce(zeros, TORCH_OPS[ReduceOp(third)])
        elif kind == BUCKET:
            here.optimizers[first].go_along(second)
        else:
            raise InvalidCall(
                f"Another rank called {_NAMES[kind]}, in which a rank that has joined cannot take part.",
                "Call it before the first rank joins.",
            )
    return follower.last()
