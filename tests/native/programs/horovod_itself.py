"""A script as its user would write it for Horovod itself. Rank 0 writes what was trained to a file."""

import sys

import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
import torch

BATCH, STEPS = 12, 8

hvd.init()
torch.manual_seed(hvd.rank())  # other weights on each rank: rank 0's are to be broadcast
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.Generator().manual_seed(7)
for _ in range(STEPS):
    inputs = torch.randn(BATCH, 6, generator=data)
    share = inputs[hvd.rank() :: hvd.size()]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(share), share.sum(1, keepdim=True)).backward()
    optimizer.step()

where = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
places = hvd.allgather_object(where)
weights = hvd.allgather(torch.cat([parameter.detach().flatten() for parameter in model.parameters()])[None])
if hvd.rank() == 0:
    torch.save({"places": places, "weights": weights}, sys.argv[1])
