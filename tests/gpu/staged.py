"""A rank of test_torch.py: every collective on GPU tensors, against the same on host tensors; then DDP."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import carme_runtime.torch

assert carme_runtime.torch

dist.init_process_group("carme")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())


def both(what):
    """The outcome on the GPU equals that on the host, bit by bit."""
    outcomes = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(rank)
        outcomes.append([tensor.cpu() for tensor in what(device)])
    for host, gpu in zip(*outcomes, strict=True):
        assert torch.equal(host, gpu), what.__name__


def random(device, *shape):
    return torch.randint(-100, 100, shape).to(torch.float32).to(device)


def allreduce(device):
    tensor = random(device, 1000, 7)
    dist.all_reduce(tensor)
    return [tensor]


def asynchronous(device):
    tensors = [random(device, 50_000) for _ in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return [tensor * 2 for tensor in tensors]


def broadcast(device):
    tensor = random(device, 33)
    dist.broadcast(tensor, src=size - 1)
    return [tensor]


def gathers(device):
    tensor = random(device, 5, 3)
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor)
    whole = torch.empty(size * 5, 3, device=device)
    dist.all_gather_into_tensor(whole, tensor)
    return [*parts, whole]


def scatters(device):
    source = random(device, size * 4)
    mine = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(mine, source)
    received = torch.empty(size * 4, device=device)
    dist.all_to_all_single(received, source)
    return [mine, received]


def reduce(device):
    tensor = random(device, 9)
    dist.reduce(tensor, dst=0)
    return [tensor] if rank == 0 else []


def point_to_point(device):
    tensor = random(device, 11)
    if size == 1:
        return [tensor]
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    return [tensor]


for what in (allreduce, asynchronous, broadcast, gathers, scatters, reduce, point_to_point):
    both(what)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
parallel = DistributedDataParallel(model, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
data = torch.randn(20, 16 * size, 64, device="cuda")
for batch in data:
    optimizer.zero_grad()
    parallel(batch[rank * 16 : (rank + 1) * 16]).square().mean().backward()
    optimizer.step()

torch.manual_seed(0)
alone = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
torch.manual_seed(0)
for batch in data:
    optimizer.zero_grad()
    alone(batch).square().mean().backward()
    optimizer.step()
for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

group = dist.distributed_c10d._get_default_group()
print(f"DONE rank {rank} of {size}, over {'NCCL' if group._nccl is not None else 'host memory'}", flush=True)
dist.destroy_process_group()
os._exit(0)
