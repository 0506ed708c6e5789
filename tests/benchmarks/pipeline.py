"""Times steps of pipelines against torch.distributed.pipelining, data parallelism, and one process.

    python tests/benchmarks/pipeline.py --quick
    python tests/benchmarks/pipeline.py --json result.json
    python tests/benchmarks/pipeline.py --rows first_steps

Two ranks with one thread each. All contestants live in the same processes and take turns, so that what else
the machine does hits them alike: compare ratios. Ranks start anew for each round, with new plans; rows are
medians over rounds, and an interval is from the least to the most of them. Costs are measured before the
turns and after them, and a prediction is the mean of both: what the machine does meanwhile is on both sides.
`single` is one rank alone on the whole batch; `floor` is what the slowest stage computes, when both compute
theirs at once without messages, times (m+p-1)/m for schedules that must fill and drain. Steps are without the
optimizer. Rows bubble_* are of 8 stages on paper. Rows peak_mb_* and plan_s_* are of plans: see
stage_memory.py. Rows first_loss_* and first_step_* are of the start while parameters travel, and need root:
see first_step.py.
"""

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from first_step import first_steps
from local_ranks import run_local_ranks
from report import print_table, row, tidy_up_when_ended, write_json
from stage_memory import peaks, plan_of_densenet

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
ROWS = ("steps", "bubbles", "memory", "plans", "first_steps")
MICRO_BATCHES = 8
RANKS = 2
ROUNDS, QUICK_ROUNDS = 5, 3
FILLING = ("gpipe", "1f1b")  # schedules that wait at the begin and at the end of a step
START_SECONDS = 900


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="a smaller model and fewer turns")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="(default: all)")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        return work(Path(arguments.worker), arguments.quick)
    tidy_up_when_ended()
    rows = []
    if "steps" in arguments.rows:
        rows += training(arguments.quick)
    if "bubbles" in arguments.rows:
        rows += bubbles()
    if "memory" in arguments.rows:
        rows += peaks(arguments.quick)
    if "plans" in arguments.rows:
        rows += plan_of_densenet()
    if "first_steps" in arguments.rows:
        rows += first_steps(arguments.quick)
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows)


def training(quick: bool) -> list[dict[str, Any]]:
    """Rows of the ranks, which this starts."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", str(result), *(["--quick"] if quick else [])]
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            run_local_ranks(command, RANKS, START_SECONDS)
            rounds.append(json.loads(result.read_text()))
    return table(rounds)


def table(rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Rows from what each round measured: milliseconds by contestant."""
    result = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    rows = []
    peers = {name: result[name] for name in ("torch_pipelining", "data_parallel", "single")}
    for schedule in SCHEDULES:
        filling = (MICRO_BATCHES + RANKS - 1) / MICRO_BATCHES if schedule in FILLING else 1
        shares = sorted(filling * each["stage"] / each[schedule] for each in rounds)
        share, faster = statistics.median(shares), peers["torch_pipelining"] / result[schedule]
        aims = f"0.95 of the bound: {share:.3f} ({shares[0]:.3f} to {shares[-1]:.3f})"
        aims += f"; 1.5x torch.distributed.pipelining: {faster:.2f}"
        judged = schedule == "1f1b"
        rows.append(
            row(
                f"step_ms_mlp_{RANKS}_{schedule}",
                "ms",
                result[schedule],
                peers=peers,
                floor=filling * result["stage"],
                aim=aims if judged else "",
                holds=share >= 0.95 and faster >= 1.5 if judged else None,
                predicted=result[f"predicted_{schedule}"],
                of_rounds=[each[schedule] for each in rounds],
                shares_of_bound=shares,
            )
        )
    offs = sorted(100 * abs(each["predicted_1f1b"] / each["1f1b"] - 1) for each in rounds)
    off = statistics.median(offs)
    aim = f"at most 10 %: {offs[0]:.1f} to {offs[-1]:.1f}"
    # What is predicted too short or too long: what a stage computes, or the step that is made of it.
    signed: dict[str, Any] = {
        name: [100 * (each[predicted] / each[measured] - 1) for each in rounds]
        for name, predicted, measured in (
            ("step_of_rounds", "predicted_1f1b", "1f1b"),
            ("stage_of_rounds", "predicted_stage_1f1b", "stage"),
        )
    }
    rows.append(row("prediction_off", "%", off, aim=aim, holds=off <= 10, of_rounds=offs, **signed))
    return rows


def bubbles() -> list[dict[str, Any]]:
    """Idle shares of 8 stages on paper, against the formulas."""
    from carme_runtime.pipeline import chain, make, simulate

    rows = []
    for name in SCHEDULES:
        schedule = make(name, 8, 16)
        simulated = 100 * simulate(schedule, chain(len(schedule.holders))).bubble
        formula = 100 * schedule.bubble
        near = abs(simulated - formula) <= 2
        rows.append(
            row(f"bubble_8_{name}", "%", simulated, floor=formula, aim="2 points of the formula", holds=near)
        )
    return rows


# What each rank does


def work(file: Path, quick: bool) -> None:
    """All contestants, in turns."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("carme")
    size, samples, turns = (512, 256, 5) if quick else (1024, 512, 9)
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(size, size), nn.ReLU())]
    model = nn.Sequential(*layers)
    inputs, targets = torch.randn(samples, size), torch.randn(samples, size)
    result: dict[str, float] = {}
    predicted: dict[str, Any] = {}  # plans, before any step was made
    contestants = {
        "single": alone(copy.deepcopy(model), inputs, targets),
        "stage": stage_alone(copy.deepcopy(model), inputs),
        "data_parallel": data_parallel(copy.deepcopy(model), inputs, targets),
        "torch_pipelining": torch_pipelining(copy.deepcopy(model), inputs, targets),
    }
    for schedule in SCHEDULES:
        contestants[schedule] = carme(copy.deepcopy(model), schedule, inputs, targets, predicted)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for turn in range(turns + 2):
        random.Random(turn).shuffle(order)
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            contestants[name]()
            dist.barrier()
            if turn > 1:
                times[name].append((time.perf_counter() - began) * 1000)
    result |= {name: statistics.median(each) for name, each in times.items()}
    for schedule, before in predicted.items():
        after = planned(copy.deepcopy(model), schedule, inputs)[0].plan()
        result[f"predicted_{schedule}"] = (before.step_ms + after.step_ms) / 2
        result[f"predicted_stage_{schedule}"] = (before.floor_ms + after.floor_ms) / 2
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


def planned(model: Any, schedule: str, inputs: Any) -> tuple[Any, Any]:
    """A pipeline whose costs are measured now, and its optimizer."""
    import torch

    from carme_runtime.torch import pipeline

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return pipeline(
        model, optimizer, example=inputs, stages=RANKS, micro_batches=MICRO_BATCHES, schedule=schedule
    )


def carme(
    model: Any, schedule: str, inputs: Any, targets: Any, predicted: dict[str, Any]
) -> Callable[[], Any]:
    from torch.nn import functional

    created, optimizer = planned(model, schedule, inputs)
    predicted[schedule] = created.plan()

    def step() -> None:
        optimizer.zero_grad()
        created.step(inputs, targets, loss=functional.mse_loss)

    return step


def alone(model: Any, inputs: Any, targets: Any) -> Callable[[], Any]:
    import torch.distributed as dist
    from torch.nn import functional

    def step() -> None:
        if dist.get_rank() == 0:
            model.zero_grad()
            functional.mse_loss(model(inputs), targets).backward()

    return step


def stage_alone(model: Any, inputs: Any) -> Callable[[], Any]:
    """What a stage computes for all micro-batches, as if its inputs and gradients were there at once."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    half = len(model) // RANKS
    own = model[rank * half : (rank + 1) * half]
    batches = [each.detach().requires_grad_(rank > 0) for each in inputs.chunk(MICRO_BATCHES)]

    def step() -> None:
        own.zero_grad()
        for batch in batches:
            batch.grad = None
            output = own(batch)
            output.backward(torch.ones_like(output))

    return step


def data_parallel(model: Any, inputs: Any, targets: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from carme_runtime.torch import parallelize

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer = parallelize(model, optimizer)
    share = slice(dist.get_rank(), None, RANKS)

    def step() -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(inputs[share]), targets[share]).backward()

    return step


def torch_pipelining(model: Any, inputs: Any, targets: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional

    rank = dist.get_rank()
    gloo = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    half = len(model) // RANKS
    own = model[rank * half : (rank + 1) * half]
    stage = PipelineStage(own, rank, RANKS, torch.device("cpu"), group=gloo)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=functional.mse_loss)

    def step() -> None:
        own.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])

    return step


if __name__ == "__main__":
    main()
