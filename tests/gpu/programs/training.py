"""`parallelize` on a GPU against one process that trains on the whole batches."""

# pyright: reportMissingImports=false

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Checks
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import parallelize
from carme_runtime.torch.parallel import join_run

torch.backends.cudnn.allow_tf32 = False  # sums in another order must not differ by more than rounding
join_run()
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
check = Checks()
STEPS, SHARE = 6, 8


def dense(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    layers = nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 8)
    return nn.Sequential(*layers).to("cuda", dtype)


def images(layout: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip
    return net.to("cuda", memory_format=layout)  # pyright: ignore


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(*shape: int, dtype: torch.dtype = torch.float32, count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHARE * size, *shape, generator=generator).to("cuda", dtype) for _ in range(count)]


def own_share(batch: torch.Tensor) -> torch.Tensor:
    return batch[rank * SHARE : (rank + 1) * SHARE]


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    data: list[torch.Tensor],
    share: Callable[[torch.Tensor], torch.Tensor],
    accumulate: int = 1,
    clip: float | None = None,
    passes: float = 1.0,
) -> None:
    """The ordinary loop; `passes`: what a loss is divided by."""
    for begin in range(0, len(data), accumulate):
        optimizer.zero_grad()
        for batch in data[begin : begin + accumulate]:
            (model(share(batch)).float().square().mean() / passes).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def compare(
    build: Callable[[], nn.Module],
    data: list[torch.Tensor],
    loose: float = 1.0,
    make: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
    clip: float | None = None,
    **options: Any,
) -> None:
    accumulate = options.get("accumulate", 1)
    model, optimizer = build(), None
    optimizer = make(model)
    if options.get("start"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)  # rank 0's are given to all
    model, optimizer = parallelize(model, optimizer, bucket_mb=0.1, clip_norm=clip, **options)
    train(model, optimizer, data, own_share, accumulate)
    alone = build()
    train(alone, make(alone), data, lambda batch: batch, accumulate, clip, passes=accumulate)
    for (name, value), expected in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        assert value.is_cuda
        torch.testing.assert_close(
            value,
            expected,
            rtol=1e-4 * loose,
            atol=1e-5 * loose,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@check
def plain() -> None:
    compare(dense, batches(32))


@check
def adam() -> None:
    compare(dense, batches(32), make=lambda model: torch.optim.AdamW(model.parameters(), eps=1e-4))


@check
def bf16() -> None:
    compare(lambda: dense(torch.bfloat16), batches(32, dtype=torch.bfloat16), loose=1000)


@check
def accumulated() -> None:
    compare(dense, batches(32), accumulate=3)


@check
def clipped() -> None:
    compare(dense, batches(32), clip=0.01)


@check
def overlapping_step() -> None:
    compare(dense, batches(32), overlap_step=True)


@check
def fewer_bits_are_for_hosts_between_nodes() -> None:
    compare(dense, batches(32), wire="bf16")


@check
def convolutions() -> None:
    compare(images, batches(4, 10, 10))
    compare(lambda: images(torch.channels_last), batches(4, 10, 10))


@check
def divided_optimizer() -> None:
    compare(dense, batches(32), shard_optimizer=True)
    compare(dense, batches(32), shard_optimizer=True, clip=0.01)
    compare(lambda: images(torch.channels_last), batches(4, 10, 10), shard_optimizer=True)


@check
def divided_optimizer_while_parameters_travel() -> None:
    compare(dense, batches(32), shard_optimizer=True, overlap_step=True)


@check
def state_of_a_divided_optimizer_is_that_of_one_process() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    states, model, alone = [], dense(), dense()
    optimizer, reference_optimizer = make(model), make(alone)
    parallelize(model, optimizer, shard_optimizer=True)
    train(model, optimizer, batches(32), own_share)
    train(alone, reference_optimizer, batches(32), lambda batch: batch)
    states = [optimizer.state_dict()["state"], reference_optimizer.state_dict()["state"]]
    for index, entries in states[1].items():
        for key, value in entries.items():
            torch.testing.assert_close(states[0][index][key], value, rtol=1e-3, atol=1e-5)


@check
def streamed_start() -> None:
    compare(dense, batches(32), start="streamed")
    compare(lambda: images(torch.channels_last), batches(4, 10, 10), start="streamed")


@check
def mixed_precision() -> None:
    """Autocast with a loss scaler, as GPU scripts have it: the scaler sees what was reduced."""
    model = dense()
    optimizer = optimizer_of(model)
    parallelize(model, optimizer)
    alone = dense()
    reference_optimizer = optimizer_of(alone)
    for trained, stepped, share in (
        (model, optimizer, own_share),
        (alone, reference_optimizer, lambda batch: batch),
    ):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for batch in batches(32):
            stepped.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = trained(share(batch)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(stepped)
            scaler.step(stepped)
            scaler.update()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-2, atol=1e-2)


@check
def compiled() -> None:
    model, alone = dense(), dense()
    optimizer = optimizer_of(model)
    parallelize(model, optimizer)
    train(torch.compile(model), optimizer, batches(32), own_share)
    train(alone, optimizer_of(alone), batches(32), lambda batch: batch)
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-4)


@check
def on_a_stream_of_its_own() -> None:
    model, alone = dense(), dense()
    optimizer = optimizer_of(model)
    parallelize(model, optimizer)
    data = batches(32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        train(model, optimizer, data, own_share)
    stream.synchronize()
    train(alone, optimizer_of(alone), data, lambda batch: batch)
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


@check
def a_step_in_a_cuda_graph_is_right_or_refused() -> None:
    """What is captured is replayed without Python, so that nothing would be reduced."""
    model, alone = dense(), dense()
    optimizer = optimizer_of(model)
    parallelize(model, optimizer)
    data = batches(32)
    train(model, optimizer, data[:3], own_share)  # the warm-up, on a stream of its own in real scripts
    inputs = own_share(data[3]).clone()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    except InvalidCall as error:
        assert "CUDA graph" in str(error), error
        return
    for batch in data[3:]:
        inputs.copy_(own_share(batch))
        graph.replay()
    torch.cuda.synchronize()
    train(alone, optimizer_of(alone), data, lambda batch: batch)
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


failed = check.run(*sys.argv[1:])
print(f"DONE rank {rank} of {size}", flush=True)
dist.destroy_process_group()
os._exit(min(failed, 1))
