"""Horovod's API on GPU tensors."""

# pyright: reportMissingImports=false

import os
import sys

import torch
from ranks import Checks

import carme_runtime.horovod as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
check = Checks()
total = sum(range(size))


def own_tensor() -> torch.Tensor:
    return torch.arange(12.0, device="cuda").view(3, 4) + rank


def base() -> torch.Tensor:
    return torch.arange(12.0, device="cuda").view(3, 4)


@check
def reductions() -> None:
    assert hvd.cuda_built() and hvd.nccl_built()
    torch.testing.assert_close(hvd.allreduce(own_tensor()), base() + total / size)
    halves = hvd.allreduce(own_tensor(), op=hvd.Sum, prescale_factor=0.5)
    torch.testing.assert_close(halves, (base() * size + total) / 2)
    assert torch.equal(hvd.allreduce(own_tensor(), op=hvd.Max), base() + size - 1)
    compressed = hvd.allreduce(own_tensor(), compression=hvd.Compression.fp16)
    torch.testing.assert_close(compressed, base() + total / size)
    several = hvd.grouped_allreduce([own_tensor(), own_tensor().long(), own_tensor().half()], op=hvd.Sum)
    assert [each.dtype for each in several] == [torch.float32, torch.int64, torch.float16]
    assert all(torch.equal(each.float(), base() * size + total) for each in several)


@check
def asynchronous_on_a_side_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(100_000, device="cuda")
        torch.cuda._sleep(300_000_000)
        tensor.add_(rank + 1)
        handles = [hvd.allreduce_async(tensor * n, op=hvd.Sum) for n in range(5)]
        results = [hvd.synchronize(handle) for handle in handles]
        stream.synchronize()
    for n, result in enumerate(results):
        assert bool((result == n * size * (size + 1) / 2).all()), n
    handle = hvd.allreduce_async_(held := own_tensor(), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is held and torch.equal(held, base() * size + total)


@check
def further_operations() -> None:
    gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank), device="cuda"))
    assert gathered.is_cuda and gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert torch.equal(hvd.broadcast(own_tensor(), root_rank=size - 1), base() + size - 1)
    parts = hvd.alltoall(torch.arange(size, device="cuda") + 10 * rank)
    parts = parts[0] if isinstance(parts, tuple) else parts
    assert parts.tolist() == [rank + 10 * r for r in range(size)]
    rows = hvd.reducescatter(torch.ones(size * 2, 3, device="cuda") * (rank + 1), op=hvd.Sum)
    assert rows.shape == (2, 3) and bool((rows == size * (size + 1) / 2).all())
    assert hvd.broadcast_object({"rank": rank}, root_rank=size - 1) == {"rank": size - 1}


@check
def training() -> None:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3)).cuda()
    reference_optimizer = torch.optim.Adam(alone.parameters(), eps=1e-4)
    torch.manual_seed(5)
    for batch in torch.randn(6, 8 * size, 20, device="cuda"):
        optimizer.zero_grad()
        model(batch[rank * 8 : (rank + 1) * 8]).square().mean().backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        alone(batch).square().mean().backward()
        reference_optimizer.step()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


failed = check.run(*sys.argv[1:])
hvd.shutdown()
os._exit(min(failed, 1))
