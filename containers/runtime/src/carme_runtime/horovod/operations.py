"""Collectives that reduce nothing; only their gradients are reduced."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.horovod.handles import Differentiable, begun, named, no_gradients, synchronize, together
from carme_runtime.horovod.notes import ALLGATHER, ALLTOALL, BARRIER, BROADCAST, DTYPES, note, number_of_type
from carme_runtime.horovod.process_sets import Members, ProcessSet, members_of
from carme_runtime.horovod.reductions import Average, allreduce


def _exchange_rows(tensor: torch.Tensor, members: Members) -> list[int]:
    """Rows of all ranks' tensors, which may differ in these alone."""
    count = tensor.shape[0]
    own = [count, tensor[:1].numel() if count else -1, number_of_type(tensor)]
    reported = torch.empty(members.size, 3, dtype=torch.int64)
    dist.all_gather_into_tensor(reported, torch.tensor([own], dtype=torch.int64), members.group)
    rows: list[list[int]] = reported.tolist()
    filled = [row for row in rows if row[1] >= 0]
    for index, row in enumerate(rows):
        if row[2] != rows[0][2] or (row[1] >= 0 and row[1] != filled[0][1]):
            raise Mismatch(
                f"Rank {members.ranks[index]} gave a tensor of {row[1]} elements to a row of type "
                f"{DTYPES[row[2]]}, rank {members.ranks[0]} one of {filled[0][1]} of type "
                f"{DTYPES[rows[0][2]]}.",
                "Give tensors of one type that differ in their first dimension alone.",
            )
    return [row[0] for row in rows]


def has_rows(operation: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the core takes it. Raises InvalidCall where it has no dimension to divide."""
    if tensor.dim() == 0:
        raise InvalidCall(f"{operation} got a tensor without dimensions.", "Give it one: tensor.reshape(1).")
    return tensor.detach().contiguous()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Begin to lay the tensors of all ranks one after the other along their first dimension."""
    source, members = has_rows("allgather", tensor), members_of(process_set)
    own_name = named("allgather", name, members)
    note(members, ALLGATHER)
    rows = _exchange_rows(source, members)
    result = source.new_empty((sum(rows), *source.shape[1:]))
    work = dist.all_gather(list(result.split(rows)), source, members.group, async_op=True)
    return begun([work], lambda: result, own_name)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """The tensors of all ranks along the first dimension, in which they may differ."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean, members = _mean(gradient, process_set), members_of(process_set)
        counts = torch.empty(members.size, dtype=torch.int64)
        dist.all_gather_into_tensor(counts, torch.tensor([tensor.shape[0]]), members.group)
        return mean.split(counts.tolist())[members.rank]

    def run(source: torch.Tensor) -> torch.Tensor:
        return synchronize(allgather_async(source, name, process_set))

    return Differentiable.apply(tensor, run, back)  # pyright: ignore


def _mean(gradient: torch.Tensor, process_set: ProcessSet | None) -> torch.Tensor:
    return allreduce(gradient, op=Average, process_set=process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Begin to gather several tensors, each as `allgather_async` does; `synchronize` returns a list."""
    own_name = named("grouped_allgather", name, members_of(process_set))
    return together([allgather_async(tensor, None, process_set) for tensor in tensors], own_name)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """Several tensors, each gathered as `allgather` does."""
    if no_gradients(tensors):
        return synchronize(grouped_allgather_async(tensors, name, process_set))
    return [allgather(tensor, name, process_set) for tensor in tensors]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Begin to give all ranks the root's tensor, in place. `root_rank` counts the ranks of the run."""
    members = members_of(process_set)
    members.number_of(root_rank, "root_rank")
    own_name = named("broadcast", name, members)
    note(members, BROADCAST)
    work = dist.broadcast(tensor.detach(), root_rank, members.group, async_op=True)
    return begun([work], lambda: tensor, own_name)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Begin to give all ranks the root's tensor; `synchronize` returns a new one."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(copy, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Give all ranks the root's tensor, in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """The root's tensor."""

    def run(source: torch.Tensor) -> torch.Tensor:
        return synchronize(broadcast_async(source, root_rank, name, process_set))

    def back(gradient: torch.Tensor) -> torch.Tensor:
        mean, members = _mean(gradient, process_set), members_of(process_set)
        return mean if members.ranks[members.rank] == root_rank else torch.zeros_like(mean)

    return Differentiable.apply(tensor, run, back)  # pyright: ignore


Splits = torch.Tensor | Sequence[int] | None


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> int:
    """Begin to send the i-th part of the rows to rank i."""
    return _exchange(tensor, splits, name, process_set, splits is not None)


def _exchange(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet | None, with_counts: bool
) -> int:
    source, members = has_rows("alltoall", tensor), members_of(process_set)
    send_counts = _splits_of(source, splits, members.size)
    own_name = named("alltoall", name, members)
    note(members, ALLTOALL)
    _exchange_rows(source, members)
    received = torch.empty_like(send_counts)
    dist.all_to_all_single(received, send_counts, group=members.group)
    result = source.new_empty((int(received.sum()), *source.shape[1:]))
    sent = source[: int(send_counts.sum())]
    work = dist.all_to_all_single(
        result, sent, received.tolist(), send_counts.tolist(), group=members.group, async_op=True
    )
    return begun([work], lambda: (result, received.to(torch.int32)) if with_counts else result, own_name)


def _splits_of(source: torch.Tensor, splits: Splits, size: int) -> torch.Tensor:
    """Rows for each rank. Raises InvalidCall where they do not divide those that there are."""
    rows = source.shape[0]
    if splits is None:
        if rows % size:
            raise InvalidCall(
                f"alltoall got {rows} rows, which {size} ranks cannot share evenly.", "Give splits."
            )
        return torch.full((size,), rows // size, dtype=torch.int64)
    send_counts = torch.as_tensor(splits).cpu()
    if send_counts.is_floating_point() or send_counts.is_complex() or send_counts.dtype == torch.bool:
        raise InvalidCall(
            f"The splits of alltoall are of type {send_counts.dtype}.",
            "Give whole numbers: torch.int32 or a list.",
        )
    send_counts = send_counts.to(torch.int64).contiguous()
    if send_counts.shape != (size,) or int(send_counts.min()) < 0 or int(send_counts.sum()) > rows:
        raise InvalidCall(
            f"The splits {send_counts.tolist()} do not divide {rows} rows among {size} ranks.",
            "Give one number of rows for each rank.",
        )
    return send_counts


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """What all ranks sent to this one; with `splits` also how many rows each did."""
    counts: list[torch.Tensor] = []

    def run(source: torch.Tensor) -> torch.Tensor:
        result, received = synchronize(_exchange(source, splits, name, process_set, True))
        counts.append(received)
        return result

    def back(gradient: torch.Tensor) -> torch.Tensor:
        # Each rank gets back as many rows as it gave; those that it kept have no gradient.
        result, _ = synchronize(_exchange(gradient, counts[0], None, process_set, True))
        saved = tensor.shape[0] - result.shape[0]
        return torch.cat([result, result.new_zeros((saved, *result.shape[1:]))]) if saved else result

    output = Differentiable.apply(tensor, run, back)
    return output if splits is None else (output, counts[0])  # pyright: ignore


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until all ranks have come here."""
    members = members_of(process_set)
    note(members, BARRIER)
    dist.barrier(members.group)
