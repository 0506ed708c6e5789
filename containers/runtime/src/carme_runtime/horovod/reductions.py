"""Sums, means and the like over ranks."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.horovod.compression import Compression
from carme_runtime.horovod.handles import (
    Differentiable,
    Grouped,
    Name,
    begun,
    named,
    synchronize,
)
from carme_runtime.horovod.notes import ALLGATHER, ALLREDUCE, note, number_of_type
from carme_runtime.horovod.process_sets import Members, ProcessSet, members_of
from carme_runtime.torch.flat import form_of_all, stating


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


def op_of(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise InvalidCall("Both average and op were given.", "Give op alone.")
    if op is None:
        return Sum if average is False else Average
    try:
        return offered(ReduceOp(op))
    except ValueError as error:
        if isinstance(error, InvalidCall):
            raise
        raise InvalidCall(
            f"There is no reduction {op!r}.", "Choose from Average, Sum, Min, Max and Product."
        ) from None


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        raise InvalidCall(
            "allreduce got a sparse tensor.",
            "Use sparse_allreduce_async, or give it dense: tensor.to_dense().",
        )
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def offered(op: ReduceOp) -> ReduceOp:
    """`op` itself. Raises InvalidCall for Adasum, which scripts may name and not use."""
    if op == Adasum:
        raise InvalidCall(
            "There is no Adasum here.", "Use Average, or Horovod itself: carme-run --backend horovod."
        )
    return op


class Scaled:
    """A reduction, and the factors before and after it.

    The mean of integers is a sum that is divided afterwards, and cut off, as Horovod does it.
    """

    def __init__(self, op: ReduceOp, prescale: float, postscale: float, members: Members) -> None:
        self.op, self._prescale, self._postscale, self._size = op, prescale, postscale, members.size

    def begin(self, tensor: torch.Tensor) -> ReduceOp:
        """Scale before the reduction, in place; what the ranks reduce with."""
        _scale(tensor, self._prescale)
        return Sum if self._averages_integers(tensor) else self.op

    def end(self, tensor: torch.Tensor) -> torch.Tensor:
        """Scale after the reduction, in place."""
        _scale(tensor, self._postscale)
        if self._averages_integers(tensor):
            tensor.div_(self._size, rounding_mode="trunc")
        return tensor

    def changes_input(self) -> bool:
        """Whether `begin` changes what it gets."""
        return self._prescale != 1.0

    def form(self, tensors: Sequence[torch.Tensor]) -> str:
        """What ranks compare: also the factors, as these would be mixed without a word."""
        factors = "" if self._prescale == self._postscale == 1.0 else f"{self._prescale}*{self._postscale} "
        return factors + form_of_all(tensors)

    def _averages_integers(self, tensor: torch.Tensor) -> bool:
        kind = tensor.dtype
        return self.op == Average and not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


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
    scaled: Scaled,
    members: Members,
    name: Name | None,
    finish: Callable[[], Any],
) -> int:
    """Begin to reduce `tensors` into `results`; those of one type and device travel together."""
    works, parts = [], []
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    with torch.no_grad():
        for indices in kinds.values():
            form = scaled.form([tensors[index] for index in indices])
            if len(indices) == 1:
                flat = results[indices[0]].detach()
                if results[indices[0]] is not tensors[indices[0]]:
                    flat.copy_(tensors[indices[0]])
            else:
                flat = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
                parts.append((flat, indices))
            by = scaled.begin(flat)
            note(members, ALLREDUCE, number_of_type(flat), flat.numel(), int(by), form=form)
            with stating(form):
                works.append(dist.all_reduce(flat, TORCH_OPS[by], members.group, async_op=True))

    def end() -> Any:
        for flat, indices in parts:
            sizes = [tensors[index].numel() for index in indices]
            for index, part in zip(indices, flat.split(sizes), strict=True):
                results[index].detach().copy_(part.view(results[index].shape))
        for result in results:
            scaled.end(result.detach())
        return finish()

    return begun(works, end, name)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to reduce a tensor over all ranks; `synchronize` returns a new tensor."""
    result, members = _room_for(tensor), members_of(process_set)
    scaled = Scaled(op_of(average, op), prescale_factor, postscale_factor, members)
    own_name = named("allreduce", name, members)
    return _reduce([tensor], [result], scaled, members, own_name, lambda: result)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to reduce a tensor over all ranks, in place."""
    members = members_of(process_set)
    scaled = Scaled(op_of(average, op), prescale_factor, postscale_factor, members)
    own_name = named("allreduce", name, members)
    return _reduce([tensor], [tensor], scaled, members, own_name, lambda: tensor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place."""
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """The tensor reduced over all ranks; its gradient is reduced the same way."""
    chosen = op_of(average, op)

    def run(source: torch.Tensor, own_name: str | None = None) -> torch.Tensor:
        small, ctx = compression.compress(source)
        factors = prescale_factor, postscale_factor
        handle = allreduce_async(small, None, own_name, chosen, *factors, process_set)
        return compression.decompress(synchronize(handle), ctx)

    return Differentiable.apply(tensor, lambda source: run(source, name), run)  # pyright: ignore


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to add up a sparse tensor over all ranks, or to take its mean; `synchronize` returns a new one.

    Raises:
        InvalidCall: A tensor that is not sparse, or another reduction.
    """
    members = members_of(process_set)
    if not tensor.is_sparse:
        raise InvalidCall("sparse_allreduce_async got a dense tensor.", "Use allreduce_async.")
    if (chosen := op_of(None, op)) not in (Average, Sum):
        raise InvalidCall(f"sparse_allreduce_async got op={op!r}.", "Choose Average or Sum.")
    own_name = named("sparse_allreduce", name, members)
    result = tensor.detach().coalesce().clone()
    note(members, ALLGATHER)
    work = dist.all_reduce(result, TORCH_OPS[chosen], members.group, async_op=True)
    return begun([work], lambda: result, own_name)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to reduce several tensors as one; `synchronize` returns a list of new ones."""
    results, members = [_room_for(tensor) for tensor in tensors], members_of(process_set)
    scaled = Scaled(op_of(average, op), prescale_factor, postscale_factor, members)
    own_name = named("grouped_allreduce", name, members)
    return _reduce(tensors, results, scaled, members, own_name, lambda: results)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to reduce several tensors as one, in place."""
    held, members = list(tensors), members_of(process_set)
    scaled = Scaled(op_of(average, op), prescale_factor, postscale_factor, members)
    own_name = named("grouped_allreduce", name, members)
    return _reduce(held, held, scaled, members, own_name, lambda: held)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """Reduce several tensors as one, in place."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """Several tensors reduced over all ranks as one; their gradients are reduced the same way."""
    chosen = op_of(average, op)

    def run(source: Sequence[torch.Tensor], own_name: str | None = None) -> list[torch.Tensor]:
        small = [compression.compress(tensor) for tensor in source]
        inputs, factors = [tensor for tensor, _ in small], (prescale_factor, postscale_factor)
        handle = grouped_allreduce_async(inputs, None, own_name, chosen, *factors, process_set)
        return [
            compression.decompress(result, ctx)
            for result, (_, ctx) in zip(synchronize(handle), small, strict=True)
        ]

    return list(Grouped.apply(run, name, *tensors))  # pyright: ignore
