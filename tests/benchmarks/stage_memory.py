"""The memory of pipelines' stages: what plans predict, and what the kernel counts; and how long a plan takes.

Each stage is a process of its own, with a quarter more memory than it needs. What it takes before its model
is made is subtracted from its peak, as plans leave out Python and PyTorch. It has trained a small model of
the same operators then, in whose freed memory Python's objects lie again: that is not given back before.
Messages lie in memory that several ranks have: each has its share of it, as in the kernel's count of a job.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from local_ranks import run_local_ranks
from report import row

RANKS, MICRO_BATCHES, STEPS = 2, 8, 4
MODELS = ("mlp", "convolutions", "transformer")
SECONDS = 600
ROOM = 1.25  # as much memory as is needed
NEAR = 10  # percent
PLAN_SECONDS = 10
MB = 1e6
_DENSENET = Path(__file__).parents[1] / "native/programs/planned_densenet.py"


def peaks(quick: bool) -> list[dict[str, Any]]:
    """A row for each stage of each model."""
    rows = []
    for model in MODELS[:2] if quick else MODELS:
        for stage, found in enumerate(_measured(model)):
            measured, predicted = found["measured"] / MB, found["predicted"] / MB
            off = 100 * (predicted / measured - 1)
            rows.append(
                row(
                    f"peak_mb_{model}_{RANKS}_stage{stage}",
                    "MB",
                    measured,
                    peers={"predicted": predicted},
                    aim=f"predicted within {NEAR} %: {off:+.1f} %",
                    holds=abs(off) <= NEAR,
                    step_peak_mb=found["of_steps"] / MB,
                )
            )
    return rows


def plan_of_densenet() -> list[dict[str, Any]]:
    """How long the plan of DenseNet-121 takes, when its operators are measured."""
    done = subprocess.run(
        [sys.executable, str(_DENSENET)], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    holds = found["plan_s"] <= PLAN_SECONDS
    aim = f"at most {PLAN_SECONDS} s"
    return [row("plan_s_densenet121", "s", found.pop("plan_s"), aim=aim, holds=holds, **found)]


def _measured(model: str) -> list[dict[str, int]]:
    """What each rank's file says."""
    with tempfile.TemporaryDirectory() as folder:
        run_local_ranks([sys.executable, __file__, model, folder], RANKS, SECONDS)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]


# What each rank does


def _make(name: str, *, small: bool) -> tuple[Any, Any, Any]:
    """A model, and inputs and targets of a batch. A small one has the same operators."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        width, samples = (64, 16) if small else (1024, 2048)
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers), torch.randn(samples, width), torch.randn(samples, width)
    if name == "convolutions":
        channels, samples, size = (4, 16, 8) if small else (32, 64, 48)
        layers = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(7):
            layers += [nn.GroupNorm(2, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        images = torch.randn(samples, 3, size, size)
        return nn.Sequential(*layers), images, torch.randn(samples, channels, size, size)
    width, length, samples = (16, 8, 16) if small else (256, 64, 128)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    words = torch.randn(samples, length, width)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), words, torch.randn_like(words)


def of_others() -> int:
    """Bytes of shared memory that this process has, and that are other processes' in equal shares."""
    status, rollup = (Path(f"/proc/self/{name}").read_text() for name in ("status", "smaps_rollup"))
    sizes = [
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith(begin))
        for text, begin in ((status, "RssShmem:"), (rollup, "Pss_Shmem:"))
    ]
    return (sizes[0] - sizes[1]) << 10


def _work(name: str, folder: Path) -> None:
    """Train, and write down what this rank's stage has taken at most."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from carme_runtime.out_of_core import pages
    from carme_runtime.pipeline import Request, plan
    from carme_runtime.torch import pipeline, trace

    torch.set_num_threads(1)
    dist.init_process_group("carme")

    def train(model: Any, inputs: Any, targets: Any) -> Any:
        optimizer: Any = torch.optim.AdamW(model.parameters())
        graph = trace(model, inputs, seconds=1.0)
        request = Request(RANKS, len(inputs), RANKS, MICRO_BATCHES)
        memory = ROOM * max(stage.memory_bytes for stage in plan(graph, request).stages)
        carme, optimizer = pipeline(
            model,
            optimizer,
            example=inputs,
            stages=RANKS,
            micro_batches=MICRO_BATCHES,
            graph=graph,
            memory=int(memory),
        )
        pages.trim()
        pages.forget_peak()
        for _ in range(STEPS):
            carme.step(inputs, targets, loss=functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        return carme

    train(*_make(name, small=True)).close()  # what libraries load and compile is there from now on
    _, inputs, targets = _make(name, small=False)
    before = pages.resident()
    carme = train(_make(name, small=False)[0], inputs, targets)
    peak = pages.peak()
    rank = dist.get_rank()
    predicted = carme.plan().stages[rank].memory_bytes
    (folder / str(rank)).write_text(
        json.dumps({"measured": peak - before - of_others(), "predicted": predicted, "of_steps": peak})
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(sys.argv[1], Path(sys.argv[2]))
