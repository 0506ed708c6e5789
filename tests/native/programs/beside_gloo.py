"""Groups of the carme backend in a run whose own group is Gloo's."""

# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for members in ([1, 3], [3, 0, 2], list(range(size)), [1, 3]):
    group: Any = dist.new_group(members, backend="carme")
    if rank not in members:
        continue
    assert dist.get_backend(group) == "carme"
    dist.all_reduce(total := torch.tensor([float(rank)]), group=group)
    assert total.item() == sum(members)
    dist.broadcast(received := torch.tensor([rank]), members[-1], group=group)
    assert received.item() == members[-1]
    everyone: list = [torch.empty(1, dtype=torch.int64) for _ in members]
    dist.all_gather(everyone, torch.tensor([rank]), group=group)
    # torch sorts a group's ranks.
    assert [int(member) for member in everyone] == dist.get_process_group_ranks(group)
dist.barrier()
dist.destroy_process_group()
