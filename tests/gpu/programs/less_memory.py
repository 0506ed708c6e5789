"""Training in less GPU memory than it needs, against training without a limit."""

# pyright: reportMissingImports=false, reportPrivateUsage=false

import gc
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import Checks
from torch import nn

import carme_runtime
from carme_runtime.out_of_core.blocks import Block, State
from carme_runtime.out_of_core.gpu_store import GpuStore
from carme_runtime.out_of_core.watch import Storage

check = Checks()
GIB, MIB = 1 << 30, 1 << 20


def wide(layers: int = 16, width: int = 4096) -> nn.Module:
    """On the GPU from the beginning: no more than a layer is made at a time."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(layers):
        model.append(nn.Linear(width, width, bias=False, device="cuda"))
        model.append(nn.GELU())
    return model


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, ...],
    steps: int = 6,
    at_end: Callable[[], None] | None = None,
) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(*shape, generator=generator).cuda()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if at_end:
            at_end()
    return [float(loss) for loss in losses]


def unlimited(build: Callable[[], nn.Module], shape: tuple[int, ...], make: Any = adam) -> tuple[Any, int]:
    """The losses, and the bytes that were needed."""
    free()
    torch.cuda.reset_peak_memory_stats()
    model = build()
    losses = train(model, make(model), shape)
    return losses, torch.cuda.max_memory_allocated()


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def most(limit: int) -> None:
    """The allocator refuses to take much more than the limit from the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total if limit else 1.0)


def compare(
    build: Any,
    shape: tuple[int, ...],
    limit: int,
    make: Any = adam,
    reserve: float = 1.25,
    tolerance: float = 0,
) -> Any:
    """`reserve`: of the limit, what the allocator may reserve. `tolerance`: 0 where sums have one order."""
    expected, needed = unlimited(build, shape, make)
    free()
    most(int(reserve * limit))
    try:
        with carme_runtime.memory(limit, device="cuda") as budget:
            model = build()
            optimizer = make(model)
            model, optimizer = budget.adopt(model, optimizer)
            steps, figures = budget._steps, []

            def note() -> None:
                figures.append((*(b // MIB for b in steps.moved), round(steps.seconds, 2), steps.followed))

            losses = train(model, optimizer, shape, at_end=note)
            print("MiB read and written, seconds, like the step before:", *figures, flush=True)
            plan, peak = budget.plan(), budget.peak
            print(f"needed {needed / MIB:.0f} MiB, limit {limit / MIB:.0f}, peak {peak / MIB:.0f}, reserved "
                  f"{torch.cuda.max_memory_reserved() / MIB:.0f}\n{plan}", flush=True)  # fmt: skip
            assert peak <= limit, (peak, limit)
            torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
            assert steps.followed, "no step went as the one before"
            return plan, needed, model, optimizer
    finally:
        most(0)


@check
def state_of_four_times_the_limit_trains_to_the_same_losses() -> None:
    plan, needed, _, _ = compare(wide, (256, 4096), GIB)
    assert needed > 3.9 * GIB
    assert plan.measured_read > GIB
    assert plan.measured_read + plan.measured_written < 1.3 * (plan.read + plan.written)


@check
def fused_and_foreach_optimizers() -> None:
    compare(lambda: wide(8), (256, 4096), GIB // 2, lambda model: adam(model, fused=True))
    compare(lambda: wide(8), (256, 4096), GIB // 2, lambda model: adam(model, foreach=False))


@check
def activations_leave_too() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
        for _ in range(8):
            layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(32, 32, 3, padding=1)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    _, needed, _, _ = compare(build, (64, 3, 128, 128), 1200 * MIB, sgd, 1.6, tolerance=1e-3)
    assert needed > 2.5 * 1200 * MIB, needed


@check
def attention_and_views() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
        return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()

    compare(build, (4, 256, 1024), 512 * MIB, reserve=1.6)


@check
def a_checkpoint_has_what_is_in_the_hosts_memory() -> None:
    model = wide(8)
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    del model
    free()
    with carme_runtime.memory(360 * MIB, device="cuda") as budget:
        model = wide(8)
        budget.adopt(model, adam(model))
        with torch.no_grad():
            model(torch.ones(2, 4096, device="cuda"))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, map_location="cpu")
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name
        assert torch.equal(model.state_dict()[name].cpu(), value), f"{name} after the end"


@check
def a_model_that_the_gpu_cannot_hold_is_made_and_trained() -> None:
    """The allocator has no more than the limit and a tenth."""
    free()
    limit = 700 * MIB
    most(int(1.1 * limit) + 64 * MIB)
    try:
        with carme_runtime.memory("700MiB", device="cuda") as budget:
            model = wide(12)
            optimizer = adam(model)
            budget.adopt(model, optimizer)
            losses = train(model, optimizer, (64, 4096))
            assert budget.peak <= limit
    finally:
        most(0)
    del model, optimizer
    assert losses == unlimited(lambda: wide(12), (64, 4096))[0]


@check
def a_block_that_was_used_while_it_was_copied_keeps_its_content() -> None:
    """It leaves at once the next time, as nothing has changed it, and the copy may not be over yet."""
    numbers = torch.arange(64 * MIB, dtype=torch.int32, device="cuda")
    storage = numbers.untyped_storage()
    store = GpuStore(storage.device, lambda block: 1.0)
    block = Block(Storage(storage), storage.data_ptr(), storage.nbytes(), 0)
    store.add(storage._cdata, block)
    store.capacity = 2 * block.size
    with torch.cuda.stream(store._out):
        torch.cuda._sleep(500_000_000)  # cycles, before the copy begins
    assert store.leave_ahead(block.size, 0, 0) == block.size and block.state is State.LEAVING
    store.acquire([block], [], 0)
    store.release([block])
    assert store.leave_ahead(block.size, 0, 0) == block.size and block.state is State.ABSENT
    # It takes the memory that is free now.
    filler = torch.full((64 * MIB,), -1, dtype=torch.int32, device="cuda")
    store.acquire([block], [], 0)
    assert torch.equal(numbers.cpu(), torch.arange(64 * MIB, dtype=torch.int32))
    assert int(filler[0]) == -1
    store.release([block])
    store.close()


@check
def what_cannot_be_is_refused() -> None:
    def refused(words: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except carme_runtime.CarmeRuntimeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")

    def too_small() -> None:
        with carme_runtime.memory("150MiB", device="cuda") as budget:
            model = wide(2)
            optimizer = adam(model)
            budget.adopt(model, optimizer)
            train(model, optimizer, (64, 4096))

    def of_the_host() -> None:
        with carme_runtime.memory("64GiB", Path.cwd()) as budget:
            model = nn.Linear(8, 8).cuda()
            budget.adopt(model, adam(model))

    refused("is too small", too_small)
    refused("device='cuda'", of_the_host)
    refused("Leave spill out", lambda: carme_runtime.memory("1GiB", "/tmp", device="cuda"))
    refused("more than the", lambda: carme_runtime.memory("1000GiB", device="cuda").__enter__())


os._exit(min(check.run(*sys.argv[1:]), 1))
