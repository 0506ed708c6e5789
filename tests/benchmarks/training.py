"""Times training steps of three models with torch DDP on Gloo, ours in three ways, and Horovod.

    python tests/benchmarks/training.py --quick
    python tests/benchmarks/training.py --json result.json

All contestants run at the same time and take turns, so that what else the machine does hits them alike:
compare ratios. All train the same model with the same batches, and must come to the same loss. Horovod takes
part where it is installed for this Python.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allreduce import Contestant, admit, free_port, read_line, spawn
from report import print_table, row, write_json

BATCH = {"mlp": 32, "cnn": 16, "transformer": 8}  # samples to a rank and step
OURS = "carme_parallelize"
WAYS = ("gloo_ddp", "carme_ddp", OURS, "carme_overlap_step", "carme_horovod", "horovod")
WARM_UP = 2  # steps
SAME_LOSS = 2e-3  # relative; the order of sums differs


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="few turns, and at most two ranks")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--rounds", type=int, help="turns (default 7, quick 3)")
    options.add_argument("--steps", type=int, default=3, help="steps to a turn (default 3)")
    options.add_argument("--models", nargs="+", choices=tuple(BATCH), default=list(BATCH))
    options.add_argument("--ranks", nargs="+", type=int, help="numbers of ranks (default 1 2 4, quick 1 2)")
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    rows = []
    for model in arguments.models:
        for ranks in arguments.ranks or ((1, 2) if arguments.quick else (1, 2, 4)):
            rows.append(measure(model, ranks, rounds, arguments.steps))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows)


def measure(model: str, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """One row: all contestants train `model`."""
    with tempfile.TemporaryDirectory() as folder:
        door = Path(folder) / "door"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(door))
        listener.listen(256)
        contestants: dict[str, Contestant] = {}
        try:
            for name in WAYS:
                if name == "horovod" and not importlib.util.find_spec("horovod"):
                    continue
                contestants[name] = start(name, model, ranks, door)
                admit(contestants[name], listener)
            times: dict[str, list[float]] = {}
            used: dict[str, list[float]] = {}
            for turn in range(rounds + 1):
                losses = {}
                for name, contestant in contestants.items():
                    answers = contestant.order({"steps": steps if turn else WARM_UP})
                    losses[name] = statistics.mean(answer["loss"] for answer in answers)
                    if turn:
                        times.setdefault(name, []).append(max(answer["ms"] for answer in answers))
                        used.setdefault(name, []).append(statistics.mean(a["cpu_ms"] for a in answers))
                expected = losses["gloo_ddp"]
                for name, loss in losses.items():
                    if abs(loss - expected) > SAME_LOSS * abs(expected):
                        raise SystemExit(f"{name}: loss {loss} instead of {expected} with {model}")
        finally:
            for contestant in contestants.values():
                contestant.end()
            listener.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = medians.pop(OURS)
    # Against others; not against our own other ways.
    best = min(value for name, value in medians.items() if not name.startswith("carme"))
    samples = BATCH[model] * ranks * 1000
    return row(
        f"step_ms_{model}_{ranks}",
        "ms",
        ours,
        peers={name: medians.get(name) for name in WAYS if name != OURS},
        aim="faster than every peer" if ranks > 1 else "",
        holds=ours < best if ranks > 1 else None,
        # Of one rank, all its threads: what is wasted in waiting shows here also on a busy machine.
        cpu_ms={name: round(statistics.median(values), 1) for name, values in used.items()},
        samples_per_second={
            name: round(samples / value, 1) for name, value in {OURS: ours, **medians}.items()
        },
    )


def start(name: str, model: str, ranks: int, door: Path) -> Contestant:
    """Start the ranks of one contestant."""
    port, processes = free_port(), []
    for rank in range(ranks):
        own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": port, "CARME_BENCHMARK_MODEL": model}
        environment = os.environ | {key: str(value) for key, value in own.items()}
        processes.append(spawn(name, door, environment, [sys.executable], Path(__file__)))
    return Contestant(name, ranks, processes)


# A rank


def work(name: str, door: str) -> None:
    """One rank of a contestant: trains as many steps as it is told, until the door closes."""
    import time

    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = os.environ["CARME_BENCHMARK_MODEL"]
    model, rank, step = prepare(name, build(kind))
    data = torch.Generator().manual_seed(1 + rank)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(door)
    connection.sendall(json.dumps({"rank": rank}).encode() + b"\n")
    while True:
        try:
            order = json.loads(read_line(connection))
        except (EOFError, OSError):
            os._exit(0)
        batches = [batch(kind, data) for _ in range(order["steps"])]
        begin, used, loss = time.perf_counter(), time.process_time(), torch.zeros(())
        for x, y in batches:
            loss = step(model, x, y)
        took = (time.perf_counter() - begin) / order["steps"] * 1000
        used = (time.process_time() - used) / order["steps"] * 1000
        connection.sendall(json.dumps({"ms": took, "cpu_ms": used, "loss": loss.item()}).encode() + b"\n")


def build(kind: str) -> Any:
    """The model: 25 M parameters in an MLP, 3 M in a residual network, 5 M in a transformer."""
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs),
            )  # fmt: skip
            self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.short(x))

    class Mean(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean(dim=1)

    if kind == "mlp":
        return nn.Sequential(
            nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 3072),
            nn.ReLU(), nn.Linear(3072, 1000),
        )  # fmt: skip
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1), Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 256, 2),
            Residual(256, 256, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000),
        )  # fmt: skip
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(4000, 256),
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        Mean(),
        nn.Linear(256, 1000),
    )


def batch(kind: str, data: Any) -> tuple[Any, Any]:
    """Inputs and classes for one step of one rank."""
    import torch

    count = BATCH[kind]
    classes = torch.randint(0, 1000, (count,), generator=data)
    if kind == "mlp":
        return torch.randn(count, 1024, generator=data), classes
    if kind == "cnn":
        return torch.randn(count, 3, 32, 32, generator=data), classes
    return torch.randint(0, 4000, (count, 64), generator=data), classes


def prepare(name: str, model: Any) -> tuple[Any, int, Callable[[Any, Any, Any], Any]]:
    """The model made ready for a way of training, this rank, and what one step is."""
    import torch
    import torch.distributed as dist

    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name in ("gloo_ddp", "carme_ddp"):
        dist.init_process_group(name.partition("_")[0])
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif name in (OURS, "carme_overlap_step"):
        from carme_runtime.torch import parallelize

        model, optimizer = parallelize(model, optimizer, overlap_step=name != OURS)
    else:
        hvd = importlib.import_module("carme_runtime.horovod" if name == "carme_horovod" else "horovod.torch")
        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step(model: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, int(os.environ["RANK"]), step


if __name__ == "__main__":
    main()
