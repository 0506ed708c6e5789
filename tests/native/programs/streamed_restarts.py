"""A run that loses a node and gets it back, whose ranks begin again while a checkpoint travels to them.

streamed_restarts.py FOLDER

The first start saves; each start waits to be stopped but the third one, in which all ranks go on.
"""

# pyright: reportMissingImports=false

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.checkpoint import Checkpoints, files
from carme_runtime.torch import parallelize
from carme_runtime.torch.parallel import join_run

torch.set_num_threads(1)
join_run()
rank, size, start = dist.get_rank(), dist.get_world_size(), int(os.environ["CARME_RESTARTS"])
folder = sys.argv[1]
read: Any = files.read
reads: list[Any] = []


def counted(checkpoint: Any, *more: Any) -> Any:
    reads.append(checkpoint)
    return read(checkpoint, *more)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that no other rank and no other call has."""
    torch.manual_seed(torch.seed() % 1000 + rank)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)]
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(2):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumed(mode: str) -> tuple[list[float], Any]:
    model, optimizer = build()
    values = Checkpoints(folder, start=mode).resume(model=model, optimizer=optimizer)
    assert values == {"step": 2}, values
    model, optimizer = parallelize(model, optimizer, start=mode)
    losses = train(model, optimizer)
    return losses, (model.state_dict(), optimizer.state_dict())


if start == 0:
    model, optimizer = parallelize(*build())
    train(model, optimizer)
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, model=model, optimizer=optimizer)
    checkpoints.wait()
    dist.barrier()
if start < 2:
    print(f"WAITS start {start}, {rank} of {size}", flush=True)
    signal.pause()
files.read = counted
losses, state = resumed("streamed")
assert len(reads) == (rank == 0), reads
expected, whole = resumed("")
assert losses == expected, (losses, expected)
torch.testing.assert_close(state, whole, rtol=0, atol=0)
print(f"GOES ON start {start}, {rank} of {size}, has read {len(reads) - 1}", flush=True)
dist.barrier()
dist.destroy_process_group()
