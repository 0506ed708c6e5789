"""Ranks that call collectives of torch.distributed with other sizes, types or shapes than rank 1.

Argument 1: which collective, for sizes; or `different`, for types and shapes in all of them.
"""

# pyright: reportMissingImports=false

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401
from carme_runtime.collectives.errors import GaspiError
from patience import HANG

kind = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("carme", timeout=timedelta(seconds=HANG))
rank, size = dist.get_rank(), dist.get_world_size()
count = 30_001 if rank == 1 else 30_000
odd = rank == 1


def exchange(tensor: torch.Tensor, group: Any) -> None:
    """Rank 0 sends, rank 1 receives."""
    dist.recv(tensor, 0, group) if odd else dist.send(tensor, 1, group)


TENSORS = {
    "other type": torch.ones(6, dtype=torch.int32 if odd else torch.float32),
    "other shape": torch.ones((3, 2) if odd else (2, 3)),
    "narrow type": torch.ones(6, dtype=torch.int8 if odd else torch.bool),
}
CALLS = {
    "broadcast": lambda t, g: dist.broadcast(t, 0, g),
    "all_reduce": lambda t, g: dist.all_reduce(t, group=g),
    "all_reduce_coalesced": lambda t, g: dist.all_reduce_coalesced([t], group=g),
    "reduce": lambda t, g: dist.reduce(t, 0, group=g),
    "all_gather": lambda t, g: dist.all_gather([torch.empty_like(t) for _ in range(size)], t, g),
    "all_gather_into_tensor": lambda t, g: (
        dist.all_gather_into_tensor(t.repeat(size), t, g)
        if t.dim() == 1
        else dist.all_gather_into_tensor(t.repeat(size, 1), t, g)
    ),
    "reduce_scatter": lambda t, g: dist.reduce_scatter(torch.empty_like(t), [t] * size, group=g),
    "reduce_scatter_tensor": lambda t, g: dist.reduce_scatter_tensor(
        torch.empty_like(t), t.repeat(size) if t.dim() == 1 else t.repeat(size, 1), group=g
    ),
    "gather": lambda t, g: dist.gather(
        t, [torch.empty_like(t) for _ in range(size)] if rank == 0 else None, 0, g
    ),
    "scatter": lambda t, g: dist.scatter(torch.empty_like(t), [t] * size if rank == 0 else None, 0, g),
    "all_to_all": lambda t, g: dist.all_to_all([torch.empty_like(t) for _ in range(size)], [t] * size, g),
    "all_to_all_single": lambda t, g: dist.all_to_all_single(
        torch.empty_like(wide := torch.cat([t] * size)), wide, group=g
    ),
    "send": exchange,
}


def differ(name: str, how: str) -> None:
    """One call with tensors that differ, in a group of its own, which may break."""
    group: Any = dist.new_group(list(range(size)))
    try:
        CALLS[name](TENSORS[how], group)
        if name != "send":
            dist.barrier(group)  # as below
    except GaspiError as error:
        print(f"{name}+{how}: {type(error).__name__} {error}")
    else:
        print(f"{name}+{how}: no error")


if kind == "different":
    for name in CALLS:
        for how in TENSORS:
            # Pairs of tensors compare their sizes alone.
            if (name, how) not in (("all_to_all", "other shape"), ("send", "other shape")):
                differ(name, how)
    dist.destroy_process_group()
    raise SystemExit
try:
    if kind == "broadcast":
        dist.broadcast(torch.zeros(count), 0)
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.zeros(count), torch.zeros(count * size))
    elif kind == "type":
        dtype = torch.int32 if rank == 1 else torch.float32
        dist.reduce_scatter_tensor(torch.zeros(300, dtype=dtype), torch.zeros(300 * size, dtype=dtype))
    else:
        # Sizes may differ, but all ranks must expect the same ones.
        parts = [torch.zeros(count if sender == rank else 30_000) for sender in range(size)]
        dist.all_gather(parts, torch.zeros(count))
    dist.barrier()  # a rank that had only to send may be through before the others have looked
except GaspiError as error:
    print(type(error).__name__, error)
else:
    print("no error")
dist.destroy_process_group()
