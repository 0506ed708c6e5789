"""A pass raises on rank 1, which makes the step nevertheless: with what the others have reduced.

Argument: what trains, `parallelize`, `overlap` (the same with overlap_step) or `horovod`.
"""

# pyright: reportMissingImports=false

import sys

import torch
import torch.distributed as dist
from torch import nn

import carme_runtime.torch as carme

face = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
# Each of these has a bucket of its own.
first, second = nn.Linear(600, 600), nn.Linear(600, 600)
model = nn.Sequential(first, nn.Tanh(), second)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if face == "horovod":
    import carme_runtime.horovod as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer)
else:
    carme.parallelize(model, optimizer, overlap_step=face == "overlap")
rank = dist.get_rank()
failing = False


def fail(gradient):
    if failing:
        raise RuntimeError("this pass fails")


def watch(module, arguments, output):
    output.register_hook(fail)


first.register_forward_hook(watch)
for step in range(4):
    optimizer.zero_grad()
    failing = step == 1 and rank == 1
    loss = model(torch.full((2, 600), float(rank + 1))).square().mean()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "this pass fails" in str(error), error
    optimizer.step()
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, flat)
assert all(torch.equal(peer, flat) for peer in everyone), "the ranks have drifted apart"
dist.destroy_process_group()
