"""Ranks that call collectives of torch.distributed with other sizes than rank 1; argument 1: which."""

# pyright: reportMissingImports=false

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401
from carme_runtime.collectives.errors import GaspiError

kind = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("carme", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
count = 30_001 if rank == 1 else 30_000
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
