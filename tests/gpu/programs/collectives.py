"""Every collective on GPU tensors against the same on host tensors, then what streams may do, and DDP."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Checks
from torch.nn.parallel import DistributedDataParallel

import carme_runtime.torch

assert carme_runtime.torch

dist.init_process_group("carme")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
check = Checks()
MIB = 1 << 20


def both(what: Callable[[str], list[torch.Tensor]]) -> None:
    """The outcome on the GPU equals that on the host, bit by bit."""
    outcomes = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(rank)
        outcomes.append([tensor.cpu() for tensor in what(device)])
    for host, gpu in zip(*outcomes, strict=True):
        assert torch.equal(host, gpu), what.__name__


def random(device: str, *shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape).to(torch.float32).to(device)


def long_kernel(milliseconds: float = 300) -> None:
    """Keep the current stream busy; what is launched behind it waits."""
    torch.cuda._sleep(int(milliseconds * 1.0e6))  # cycles, at no less than 1 GHz


@check
def allreduce() -> None:
    def of(device: str) -> list[torch.Tensor]:
        tensor = random(device, 1000, 7)
        dist.all_reduce(tensor)
        return [tensor]

    both(of)


@check
def many_at_a_time() -> None:
    def of(device: str) -> list[torch.Tensor]:
        tensors = [random(device, 50_000) for _ in range(8)]
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        return [tensor * 2 for tensor in tensors]

    both(of)


@check
def broadcast() -> None:
    def of(device: str) -> list[torch.Tensor]:
        tensor = random(device, 33)
        dist.broadcast(tensor, src=size - 1)
        return [tensor]

    both(of)


@check
def gathers() -> None:
    def of(device: str) -> list[torch.Tensor]:
        tensor = random(device, 5, 3)
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        whole = torch.empty(size * 5, 3, device=device)
        dist.all_gather_into_tensor(whole, tensor)
        return [*parts, whole]

    both(of)


@check
def scatters() -> None:
    def of(device: str) -> list[torch.Tensor]:
        source = random(device, size * 4)
        scattered = torch.empty(4, device=device)
        dist.reduce_scatter_tensor(scattered, source)
        received = torch.empty(size * 4, device=device)
        dist.all_to_all_single(received, source)
        return [scattered, received]

    both(of)


@check
def reduce() -> None:
    def of(device: str) -> list[torch.Tensor]:
        tensor = random(device, 9)
        dist.reduce(tensor, dst=0)
        return [tensor] if rank == 0 else []

    both(of)


@check
def point_to_point() -> None:
    def of(device: str) -> list[torch.Tensor]:
        tensor = random(device, 11)
        if size > 1 and rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        return [tensor]

    both(of)


@check
def gather_and_scatter_of_one_rank() -> None:
    def of(device: str) -> list[torch.Tensor]:
        tensor = random(device, 6)
        parts = [torch.empty_like(tensor) for _ in range(size)] if rank == 0 else None
        dist.gather(tensor, parts, dst=0)
        back = torch.empty_like(tensor)
        dist.scatter(back, parts, src=0)
        assert torch.equal(back, tensor)
        return parts or []

    both(of)


@check
def types() -> None:
    floating = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    whole = (torch.uint8, torch.int8, torch.int32, torch.int64)
    for dtype in (*floating, *whole):
        tensor = (torch.arange(1000, device="cuda") % 7 + rank).to(dtype)
        dist.all_reduce(tensor)
        expected = (torch.arange(1000) % 7) * size + sum(range(size))
        assert torch.equal(tensor.cpu(), expected.to(dtype)), dtype
        dist.broadcast(given := torch.full((65,), rank + 3, dtype=dtype, device="cuda"), src=size - 1)
        assert bool((given == size + 2).all()), dtype
    flags = torch.tensor([rank == 0, True, False], device="cuda")
    dist.broadcast(flags, src=0)
    assert flags.tolist() == [True, True, False]


@check
def mean_and_largest() -> None:
    tensor = torch.full((300, 5), float(rank), device="cuda").t()  # not contiguous
    turned = tensor.contiguous()
    dist.all_reduce(turned, op=dist.ReduceOp.AVG)
    assert bool((turned == sum(range(size)) / size).all())
    largest = tensor.contiguous()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert bool((largest == size - 1).all())


@check
def a_gibibyte() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        count = (1 << 30) // dtype.itemsize
        tensor = torch.full((count,), rank + 1, dtype=dtype, device="cuda")
        tensor[-1] = 7
        dist.all_reduce(tensor)
        assert bool((tensor[:-1] == size * (size + 1) // 2).all()) and int(tensor[-1]) == 7 * size
        dist.broadcast(given := torch.full((count,), rank, dtype=dtype, device="cuda"), src=0)
        assert not bool(given.any())
        del tensor, given


@check
def nothing_is_read_before_the_stream_has_made_it() -> None:
    for _ in range(3):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros(3 * MIB, device="cuda")
            long_kernel()
            tensor.add_(rank + 1)
            work: Any = dist.all_reduce(tensor, async_op=True)
            work.wait()
            doubled = tensor * 2
        stream.synchronize()
        assert bool((doubled == size * (size + 1)).all())


@check
def the_waiting_stream_sees_the_result() -> None:
    """Begun on one stream, waited for on another."""
    begun, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(begun):
        tensor = torch.full((3 * MIB,), 0.0, device="cuda")
        long_kernel()
        tensor.fill_(rank + 1)
        work: Any = dist.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(waiting):
        work.wait()
        doubled = tensor * 2
    waiting.synchronize()
    assert bool((doubled == size * (size + 1)).all())


@check
def memory_of_what_travels_is_not_given_away() -> None:
    works, results = [], []
    for number in range(6):
        long_kernel(50)
        tensor = torch.full((MIB,), float(number + rank), device="cuda")
        works.append(dist.all_reduce(tensor, async_op=True))
        results.append(tensor)
        # What is freed meanwhile is allocated again, and overwritten.
        for _ in range(4):
            torch.full((MIB,), -1.0, device="cuda")
    for number, (work, tensor) in enumerate(zip(works, results, strict=True)):
        work.wait()
        assert bool((tensor == number * size + sum(range(size))).all()), number


@check
def launching_a_collective_does_not_wait_for_kernels() -> None:
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    long_kernel(1000)
    work: Any = dist.all_reduce(tensor, async_op=True)
    end.record()
    assert not end.query(), "the call waited until the GPU was idle"
    work.wait()
    torch.cuda.synchronize()


@check
def futures() -> None:
    work: Any = dist.all_reduce(tensor := torch.full((5000,), rank + 1.0, device="cuda"), async_op=True)
    tripled = work.get_future().then(lambda future: future.value()[0] * 3).wait()
    assert bool((tripled == 3 * size * (size + 1) / 2).all()) and tripled.is_cuda
    assert bool((tensor == size * (size + 1) / 2).all())


@check
def objects_and_barriers() -> None:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "tensor": torch.full((3,), rank, device="cuda").cpu()})
    assert [each["rank"] for each in everyone] == list(range(size))
    dist.barrier()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
    return torch.nn.Sequential(*layers).cuda()


def trained_alone(data: torch.Tensor) -> torch.nn.Module:
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        optimizer.step()
    return alone


def trained_by_ddp(data: torch.Tensor, hook: Any = None, **options: Any) -> torch.nn.Module:
    model = network()
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.02, **options)
    if hook:
        parallel.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        parallel(batch[rank * 16 : (rank + 1) * 16]).square().mean().backward()
        optimizer.step()
    return model


def data() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(20, 16 * size, 64, device="cuda")


def same(model: torch.nn.Module, reference: torch.nn.Module, loose: float = 1.0) -> None:
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4 * loose, atol=1e-5 * loose)


@check
def data_parallel() -> None:
    same(trained_by_ddp(data()), trained_alone(data()))
    same(trained_by_ddp(data(), gradient_as_bucket_view=True, static_graph=True), trained_alone(data()))


@check
def data_parallel_with_fewer_bits() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    same(trained_by_ddp(data(), hook=bf16_compress_hook), trained_alone(data()), loose=300)


@check
def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data():
        optimizer.zero_grad()
        model(batch[rank * 16 : (rank + 1) * 16]).square().mean().backward()
        optimizer.step()
    for parameter, expected in zip(model.parameters(), trained_alone(data()).parameters(), strict=True):
        whole: Any = parameter
        torch.testing.assert_close(whole.full_tensor(), expected, rtol=1e-4, atol=1e-5)


failed = check.run(*sys.argv[1:])
group: Any = dist.distributed_c10d._get_default_group()
transport = "NCCL" if group._nccl is not None else "host memory"
print(f"DONE rank {rank} of {size}, over {transport}", flush=True)
dist.destroy_process_group()
os._exit(min(failed, 1))
