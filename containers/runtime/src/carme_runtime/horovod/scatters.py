"""Reductions that give each rank its rows. Their gradients are gathered, and those of gathers reduced."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.horovod.compression import Compression
from carme_runtime.horovod.handles import Differentiable, begun, named, no_gradients, synchronize, together
from carme_runtime.horovod.notes import REDUCESCATTER, note
from carme_runtime.horovod.operations import allgather, has_rows
from carme_runtime.horovod.process_sets import ProcessSet, members_of
from carme_runtime.horovod.reductions import TORCH_OPS, Average, ReduceOp, Scaled, Sum, op_of
from carme_runtime.torch.flat import stating


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to reduce a tensor over all ranks; each gets some rows, the first ranks one more."""
    source, members = has_rows("reducescatter", tensor), members_of(process_set)
    own_name = named("reducescatter", name, members)
    scaled = Scaled(op_of(None, op), prescale_factor, postscale_factor, members)
    count, size = source.shape[0], members.size
    rows = [count // size + (index < count % size) for index in range(size)]
    form = scaled.form([source])
    if scaled.changes_input():
        source = source.clone()
    by = scaled.begin(source)
    result = source.new_empty((rows[members.rank], *source.shape[1:]))
    note(members, REDUCESCATTER)
    with stating(form):
        work = dist.reduce_scatter(
            result, list(source.split(rows)), TORCH_OPS[by], members.group, async_op=True
        )
    return begun([work], lambda: scaled.end(result), own_name)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """This rank's rows of the tensor reduced over all ranks."""

    def run(source: torch.Tensor) -> torch.Tensor:
        small, ctx = compression.compress(source)
        handle = reducescatter_async(small, name, op, prescale_factor, postscale_factor, process_set)
        return compression.decompress(synchronize(handle), ctx)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        whole = allgather(gradient * (prescale_factor * postscale_factor), process_set=process_set)
        return whole * members_of(process_set).size if op == Sum else whole

    return Differentiable.apply(tensor, run, back)  # pyright: ignore


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to reduce several tensors as `reducescatter_async` does; `synchronize` returns a list."""
    own_name = named("grouped_reducescatter", name, members_of(process_set))
    handles = [
        reducescatter_async(tensor, None, op, prescale_factor, postscale_factor, process_set)
        for tensor in tensors
    ]
    return together(handles, own_name)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """Several tensors, each reduced and divided as `reducescatter` does."""
    if not no_gradients(tensors):
        return [
            reducescatter(tensor, name, compression, op, prescale_factor, postscale_factor, process_set)
            for tensor in tensors
        ]
    small = [compression.compress(tensor) for tensor in tensors]
    handle = grouped_reducescatter_async(
        [tensor for tensor, _ in small], name, op, prescale_factor, postscale_factor, process_set
    )
    return [
        compression.decompress(result, ctx)
        for result, (_, ctx) in zip(synchronize(handle), small, strict=True)
    ]
