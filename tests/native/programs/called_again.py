"""Ranks that train parameters that come later, a compiled model, and what `parallelize` refuses."""

# pyright: reportMissingImports=false

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import parallelize


def refused(what: str, *words: str) -> None:
    """Say so if `what` raises the error that has these words."""
    try:
        exec(what, globals())
    except InvalidCall as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{error} has no {missing}"
    else:
        raise AssertionError(f"{what} was not refused")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(24, 10), torch.randn(24, 3)
plain = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16).eval(), nn.ReLU(), nn.Linear(16, 3))
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for clip in (0, -1, float("nan")):
    refused(f"parallelize(model, optimizer, clip_norm={clip})".replace("nan", "float('nan')"), "clip_norm=")
for overlap in (False, True):
    alone, tested = copy.deepcopy(plain), copy.deepcopy(plain)
    pairs = [(each, torch.optim.AdamW(each.parameters(), lr=0.01)) for each in (alone, tested)]
    for each in (alone, tested):
        each[0].requires_grad_(False)
    model, optimizer = parallelize(*pairs[1], overlap_step=overlap)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = x[rank::size], y[rank::size]
    steps(*pairs[0], x, y)
    steps(model, optimizer, *own)
    for each in (alone, tested):
        each[0].requires_grad_(True)
    refused("model(x)", "0.weight", "again")
    model, optimizer = parallelize(model, optimizer, overlap_step=overlap)
    steps(*pairs[0], x, y)
    steps(model, optimizer, *own)
    # What looks at the samples talks to the other ranks, and is left out of what is compiled.
    steps(*pairs[0], x, y)
    compiled: Any = torch.compile(model, backend="aot_eager")
    steps(compiled, optimizer, *own)
    for a, b in zip(alone.parameters(), tested.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
model = nn.Embedding(50, 8, sparse=True)
model, optimizer = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
refused("model(torch.arange(4)).sum().backward()", "sparse")
dist.destroy_process_group()
