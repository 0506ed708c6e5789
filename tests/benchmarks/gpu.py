"""What the runtime and the exporter cost on one GPU: medians of interleaved rounds.

    python tests/benchmarks/gpu.py steps memory exporter --out gpu.json
    torchrun --nproc-per-node 2 tests/benchmarks/gpu.py staged --out staged.json    # ranks share the GPU

Needs a GPU and the runtime with its native core; `exporter` needs carme_monitoring.
"""

# pyright: reportMissingImports=false

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from carme_runtime import strict_json

MIB = 1 << 20
Rows = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["steps", "staged", "memory", "exporter"])
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows: Rows = {}
    for what in options.what:
        rows |= globals()[what](options.rounds)
    if int(os.environ.get("RANK", "0")) == 0:
        found = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "rows": rows,
        }
        print(strict_json.dumps(found, indent=1))
        if options.out:
            options.out.write_text(strict_json.dumps(found, indent=1))


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def timed(step: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of each step, kernels included."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1000)
    return times


def spread(times: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4), "n": len(times)}


# -- steps of training on one rank


def resnet() -> tuple[nn.Module, torch.Tensor]:
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model = resnet50().cuda().to(memory_format=torch.channels_last)  # pyright: ignore
    x = torch.randn(128, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    return model, x


def transformer() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda()
    return model, torch.randn(16, 512, 1024, device="cuda")


def small() -> tuple[nn.Module, torch.Tensor]:
    """Many small kernels: what a step costs is what its launches cost."""
    torch.manual_seed(0)
    layers = [part for _ in range(24) for part in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    return nn.Sequential(*layers).cuda(), torch.randn(64, 256, device="cuda")


def stepping(model: Any, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


def contestants(
    build: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The same training with each contestant: plain PyTorch, `parallelize`, DDP on NCCL and on carme.

    `parallelize` leaves a single rank alone; `parallelize_hooks` gathers and scales gradients all the same,
    as with more ranks.
    """
    from carme_runtime.torch import parallelize
    from carme_runtime.torch.parallel import Parallel

    attached: list[Any] = []
    for contestant in ("plain", "parallelize", "parallelize_hooks", "ddp_nccl", "ddp_carme"):
        model, x = build()
        optimizer = torch.optim.AdamW(model.parameters())
        trained: Any = model
        if contestant == "parallelize":
            parallelize(model, optimizer)
        elif contestant == "parallelize_hooks":
            attached.append(Parallel(model, None))
        elif contestant.startswith("ddp"):
            group = dist.new_group(backend="nccl") if contestant == "ddp_nccl" else None
            trained = DistributedDataParallel(model, device_ids=[0], process_group=group)
        yield contestant, stepping(trained, x, optimizer)


def steps(rounds: int) -> Rows:
    """Training steps on one rank: what the hooks cost."""
    from carme_runtime.torch.parallel import join_run

    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }
    os.environ.update({name: os.environ.get(name, value) for name, value in environment.items()})
    join_run()
    rows: Rows = {}
    for name, build in (("resnet50", resnet), ("transformer", transformer), ("small", small)):
        known = dict(contestants(build))
        for step in known.values():
            timed(step, 5)
        times: dict[str, list[float]] = {contestant: [] for contestant in known}
        for _ in range(rounds):
            for contestant, step in known.items():
                times[contestant] += timed(step, 8)
        rows |= {f"step_ms_{name}_{contestant}": spread(found) for contestant, found in times.items()}
        del known
        free()
    return rows


# -- two ranks that share the GPU


def staged(rounds: int) -> Rows:
    """Allreduce of tensors on a GPU that ranks share: through carme's host memory, and Gloo's."""
    import carme_runtime.torch

    assert carme_runtime.torch
    dist.init_process_group("carme")
    groups = {"carme": None, "gloo": dist.new_group(backend="gloo")}
    rows: Rows = {}
    for size in (1 << 10, 1 << 16, MIB, 16 * MIB, 256 * MIB):
        tensor = torch.ones(size // 4, device="cuda")
        calls = {
            n: functools.partial(dist.all_reduce, tensor, dist.ReduceOp.MAX, g) for n, g in groups.items()
        }
        times: dict[str, list[float]] = {name: [] for name in groups}
        for number in range(rounds + 1):
            for name, reduce in calls.items():
                found = timed(reduce, 5 if size > MIB else 30)
                times[name] += found if number else []  # the first round makes buffers
        for name, found in times.items():
            rows[f"allreduce_ms_{size}_{name}"] = spread(found)
            rows[f"allreduce_ms_{size}_{name}"]["GB_per_s"] = round(size / statistics.median(found) / 1e6, 3)
    return rows


# -- less memory than is needed


def wide(layers: int = 24, width: int = 4096) -> tuple[nn.Module, torch.Tensor]:
    """Weights and their state are what is large."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.GELU())]
    return nn.Sequential(*parts).cuda(), torch.randn(4096, width, device="cuda")


def deep() -> tuple[nn.Module, torch.Tensor]:
    """Activations are what is large."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda()
    return model, torch.randn(24, 512, 1024, device="cuda")


def memory(rounds: int) -> Rows:
    """Steps within a limit of the GPU's memory; the factor is what is needed over what there is."""
    import carme_runtime

    rows: Rows = {}
    for name, build in (("wide", wide), ("deep", deep)):
        free()
        model, x = build()
        step = stepping(model, x, torch.optim.AdamW(model.parameters()))
        timed(step, 3)
        needed = torch.cuda.max_memory_allocated()
        rows[f"step_ms_{name}_unlimited"] = spread(timed(step, 8)) | {"peak_mib": needed / MIB}
        torch.cuda.reset_peak_memory_stats()
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            timed(step, 2)
            times = timed(step, 6)
        peak = torch.cuda.max_memory_allocated()
        rows[f"step_ms_{name}_save_on_cpu"] = spread(times) | {"peak_mib": peak / MIB}
        print(name, json.dumps(rows), flush=True)
        del model, x, step
        limits = {f"{factor}x": int(needed / factor) for factor in (1.33, 2, 4, 8)}
        limits["as_save_on_cpu"] = peak
        for label, limit in limits.items():
            free()
            try:
                budget: Any
                with carme_runtime.memory(limit, device="cuda") as budget:
                    model, x = build()
                    optimizer = torch.optim.AdamW(model.parameters())
                    budget.adopt(model, optimizer)
                    step = stepping(model, x, optimizer)
                    timed(step, 4)
                    found = spread(timed(step, 5))
                    plan = budget.plan()
                    found |= {"limit_mib": limit / MIB, "peak_mib": budget.peak / MIB}
                    found |= {
                        "read_mib": plan.measured_read / MIB,
                        "written_mib": plan.measured_written / MIB,
                    }
                    found |= {"belady_mib": (plan.read + plan.written) / MIB}
                    found |= {
                        "compute_ms": 1000 * plan.compute_seconds,
                        "floor_ms": 1000 * plan.floor_seconds,
                    }
                    found |= {"read_gb_s": plan.read_rate / 1e9, "write_gb_s": plan.write_rate / 1e9}
                    rows[f"step_ms_{name}_{label}"] = found
                    print(name, label, json.dumps(found), flush=True)
            except (carme_runtime.CarmeRuntimeError, torch.OutOfMemoryError) as error:
                print(f"{name} {label}: {error}", flush=True)
            model = x = optimizer = step = budget = None
    return rows


# -- the exporter


def exporter(rounds: int) -> Rows:
    """How long the exporter reads the GPU by NVML, idle and under load."""
    from carme_monitoring.gpus import NvidiaLibrary

    library, rows = NvidiaLibrary(), {}
    for _ in range(3):
        library.read()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for state in ("idle", "busy"):
        times = []
        for _ in range(20 * rounds):
            if state == "busy":
                for _ in range(8):
                    matrix @ matrix
            began = time.perf_counter()
            library.read()
            times.append((time.perf_counter() - began) * 1000)
        torch.cuda.synchronize()
        rows[f"read_ms_{state}"] = spread(times)
    library.close()
    return rows


if __name__ == "__main__":
    main()
