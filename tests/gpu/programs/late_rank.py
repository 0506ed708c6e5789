"""Rank 1 works elsewhere, on its GPU, while rank 0 waits for it in a collective on GPU tensors."""

# pyright: reportMissingImports=false

import time

import torch
import torch.distributed as dist

import carme_runtime.torch

assert carme_runtime.torch
dist.init_process_group("carme")
tensor = torch.ones(3, device="cuda")
dist.all_reduce(tensor)
torch.cuda.synchronize()


def busy_elsewhere() -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        torch.ones(3, device="cuda").add_(1).sum().item()


if dist.get_rank() == 1:
    busy_elsewhere()
dist.all_reduce(tensor)
assert tensor.tolist() == [4.0, 4.0, 4.0]
dist.destroy_process_group()
