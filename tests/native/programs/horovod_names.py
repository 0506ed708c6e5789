"""Names of Horovod's operations: none is given to two operations of a kind that are under way together.

Every rank but 0 keeps its part of an operation back until rank 0 has seen what it came for, so that the
operation is under way on rank 0 for certain.
"""

# pyright: reportPrivateUsage=false, reportMissingImports=false

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import carme_runtime.horovod as hvd
from carme_runtime.torch import sparse

torch.set_num_threads(1)
hvd.init()
rank, size = hvd.rank(), hvd.size()
store: Any = distributed_c10d._get_default_store()
due = ""  # for what the ranks that keep back wait; empty: for nothing


def delayed(begin: Callable[..., Any]) -> Callable[..., Any]:
    def late(*arguments: Any, **options: Any) -> Any:
        # A sparse tensor's numbers of elements travel first, and at once.
        if due and options.get("async_op") and not getattr(arguments[0], "is_sparse", False):
            store.get(due)
        return begin(*arguments, **options)

    return late


def begin_sparse(tensor: Any, members: int, divisor: float, gather: Callable[..., Any], original: Any) -> Any:
    gathered: list[Any] = []

    def late(*arguments: Any) -> Any:
        if due and gathered:
            store.get(due)
        gathered.append(gather(*arguments))
        return gathered[-1]

    return original(tensor, members, divisor, late)


if rank:
    sparse.begin = partial(begin_sparse, original=sparse.begin)
    for call in ("all_reduce", "broadcast", "all_gather", "all_to_all_single", "reduce_scatter"):
        setattr(dist, call, delayed(getattr(dist, call)))


def let_go() -> None:
    """Rank 0 has seen it."""
    global due
    if rank == 0:
        store.set(due, b"go")
    due = ""


def after_letting_go(begin: Callable[..., Any]) -> Callable[..., Any]:
    def now(*arguments: Any, **options: Any) -> Any:
        if due:
            let_go()
        return begin(*arguments, **options)

    return now


def refused(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except ValueError as error:  # Horovod's own
        assert not isinstance(error, hvd.HorovodInternalError)
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"an operation got the name of one that is under way: {words}")


def ones() -> torch.Tensor:
    return torch.ones(size, 2)


def rows() -> torch.Tensor:
    return torch.eye(size).to_sparse()


ends = hvd.add_process_set(sorted({0, size - 1}))
calls: dict[str, Callable[[str | None], int]] = {
    "allreduce": lambda name: hvd.allreduce_async(ones(), name=name),
    "allreduce_": lambda name: hvd.allreduce_async_(ones(), name=name),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce_async([ones(), ones().long()], name=name),
    "grouped_allreduce_": lambda name: hvd.grouped_allreduce_async_([ones(), ones()], name=name),
    "sparse_allreduce": lambda name: hvd.sparse_allreduce_async(rows(), name=name or ""),
    "broadcast": lambda name: hvd.broadcast_async(ones(), 0, name=name),
    "broadcast_": lambda name: hvd.broadcast_async_(ones(), 0, name=name),
    "allgather": lambda name: hvd.allgather_async(ones(), name=name),
    "grouped_allgather": lambda name: hvd.grouped_allgather_async([ones()], name=name),
    "alltoall": lambda name: hvd.alltoall_async(ones(), name=name),
    "reducescatter": lambda name: hvd.reducescatter_async(ones(), name=name),
    "grouped_reducescatter": lambda name: hvd.grouped_reducescatter_async([ones()], name=name),
}
for kind, begin in calls.items():
    due = f"{kind} under way"
    handle = begin("weights")
    if rank == 0:
        assert not hvd.poll(handle)
        words = (kind.rstrip("_"), "'weights'", "under way", "Synchronize")
        refused(lambda begin=begin: begin("weights"), *words)
    let_go()
    hvd.synchronize(handle)
    handle = begin("weights")  # which is free again
    while not hvd.poll(handle):
        pass
    # It is over, as Horovod counts, although nobody has synchronized it; without names all may begin.
    handles = [handle, begin("weights"), begin(None), begin(None), begin(""), begin("")]
    for each in handles:
        hvd.synchronize(each)

# A call that waits has the name as well. Kinds and sets of ranks have names of their own.
due = "names of their own"
handles = [
    hvd.allreduce_async(ones(), name="both"),
    hvd.broadcast_async(ones(), 0, name="both"),
    hvd.grouped_allreduce_async([ones()], name="both"),
]
if ends.included():
    handles.append(hvd.allreduce_async(ones(), name="both", process_set=ends))
if rank == 0:
    refused(lambda: hvd.allreduce(ones(), name="both"), "allreduce", "'both'")
    refused(lambda: hvd.allreduce_(ones(), name="both"), "allreduce", "'both'")
    refused(lambda: hvd.broadcast_parameters([("both", ones())]), "broadcast", "'both'")
    refused(lambda: hvd.allreduce(ones(), name="both", process_set=ends), "allreduce", "'both'")
let_go()
for handle in handles:
    hvd.synchronize(handle)

# A gradient is reduced without the name, which another operation may have by then.
given = ones().requires_grad_()
(result,) = hvd.grouped_allreduce([hvd.allreduce(given, name="loss")], name="loss")
due = "a gradient"
handles = [hvd.allreduce_async(ones(), name="loss"), hvd.grouped_allreduce_async([ones()], name="loss")]
if rank == 0:
    dist.all_reduce = after_letting_go(dist.all_reduce)
else:
    let_go()
result.sum().backward()
for handle in handles:
    hvd.synchronize(handle)

# An error frees the name; between nodes it ends the group.
if sys.argv[1] == "one node":
    for _ in range(2):
        try:
            hvd.allreduce(torch.ones(2 + rank), name="wrong")
        except hvd.HorovodInternalError as error:
            assert "wrong" in str(error), error
        else:
            raise AssertionError("ranks differ, and nobody says so")
hvd.shutdown()
