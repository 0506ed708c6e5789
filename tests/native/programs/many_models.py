"""Models that are trained one after the other, as a search for good settings does it, give their memory back.

Argument: how each one ends, `detach`, `forget` (the cycles wait for the garbage collector), or `keep` (its
gradients are still held when the next ones come).
"""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false

import gc
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import carme_runtime.torch as carme
from carme_runtime.torch.options import Options
from carme_runtime.torch.parallel import Parallel, join_run

how = sys.argv[1]
WIDTH = 64 if how == "keep" else 512
BYTES = 2 * WIDTH * WIDTH * 4 + 2**21  # the segment's head
torch.set_num_threads(1)
join_run()
rank, size = dist.get_rank(), dist.get_world_size()
copies = []


def shared():
    """Bytes of segments that this process has mapped, its own and those of others."""
    areas = re.findall(
        r"^(\w+)-(\w+) .*memfd:carme-segment", Path("/proc/self/maps").read_text(), re.MULTILINE
    )
    return sum(int(end, 16) - int(begin, 16) for begin, end in areas)


def train(number):
    torch.manual_seed(number)
    last = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = None
    if how == "detach":
        parallel = Parallel(model, optimizer, Options(overlap_step=number % 2 == 1))
    else:
        carme.parallelize(model, optimizer, overlap_step=number % 2 == 1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (model(torch.full((2, WIDTH), float(rank + 1))) * 1e-3).sum()
        loss.backward()
        optimizer.step()
    gradient = last.weight.grad
    assert gradient is not None
    everyone = [torch.empty_like(gradient) for _ in range(size)]
    dist.all_gather(everyone, gradient)
    assert all(torch.equal(peer, gradient) for peer in everyone), "gradients were not reduced"
    if how == "keep":
        copies.append((gradient, gradient.clone()))
    if parallel:
        parallel.detach()


for number in range(40 if how != "keep" else 260):
    train(number)
    if number % (3 + rank) == 0:  # ranks look for garbage at different times
        gc.collect()
assert all(torch.equal(gradient, copy) for gradient, copy in copies), "memory in use was given away"
if how != "keep":
    gc.collect()
    assert shared() < 6 * size * BYTES, shared()
dist.barrier()
dist.destroy_process_group()
