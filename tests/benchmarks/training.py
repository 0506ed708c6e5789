"""Times training steps of five models with torch DDP on Gloo, ours with several options, and Horovod.

    python tests/benchmarks/training.py --quick
    python tests/benchmarks/training.py --json result.json

All contestants run at the same time and take turns, so that what else the machine does hits them alike:
compare ratios. All train the same model with the same batches, and must come to the same loss after every
turn: seconds_to_loss in the JSON is what each needed for that of the last. Horovod takes part where it is
installed for this Python.

The models keras_* are of Keras' layers on PyTorch: ours trains them by carme_runtime.keras (train_on_batch,
with Keras' own loss and optimizer), the others in a loop of PyTorch's around the same model.

Rows step_ms_<model>_2_<rate> are of two nodes (see two_nodes.py) with a link of that rate. Rows hidden_* say
how much of the communication that could be hidden was: (computing alone + communicating alone - the step)
over the same with an ideal step. That one is the longer of two times. The first: every gradient travels as
soon as it is made and the wire has brought the ones before it, each in its share of communicating alone;
what is made last cannot be hidden. The second: computing alone and what a core has to do while it does
nothing but communicate, its interrupts included, as both need the same core. Where less than a tenth of
computing alone can be hidden there is no such row.
"""

import argparse
import contextlib
import importlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allreduce import Contestant, Scene, admit, has_horovod, start, start_horovod
from allreduce_ranks import come_in, pin, read_line
from report import print_table, row, tidy_up_when_ended, write_json
from two_nodes import TwoNodes, can_be_made

BATCH = {
    "mlp": 32,
    "cnn": 16,
    "transformer": 8,
    "keras_mlp": 32,
    "keras_cnn": 16,
}  # samples to a rank and step
CARME = "carme_parallelize"
KERAS = "carme_keras"  # ours for models of Keras, which the others train in a loop of PyTorch's
ALONE = "alone"  # computes without communicating
METHODS = ("gloo_ddp", "carme_ddp", CARME, "carme_overlap_step", "carme_horovod", "horovod")
KERAS_METHODS = ("gloo_ddp", "carme_ddp", KERAS, "carme_horovod", "horovod")
QUICK = ("mlp", "keras_mlp")
RATES = (10.0, 1.0)  # Gbit/s of the link between two nodes
WARM_UP = 2  # steps
COMMUNICATE_MS = (
    1000.0  # so long at least: the kernel counts how long a core was idle in hundredths of a second
)
LEAST_HIDEABLE = 0.1  # of the time of a step that computes alone
UNTIMED = 1  # first step of a turn: what the others left in the caches, and sleepers that wake
SAME_LOSS = 2e-3  # relative; the order of sums differs


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="few turns of two models on two ranks")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--rounds", type=int, help="turns (default 7, quick 3)")
    options.add_argument("--steps", type=int, default=3, help="steps to a turn (default 3)")
    options.add_argument(
        "--models", nargs="+", choices=tuple(BATCH), help="(default all, quick mlp keras_mlp)"
    )
    options.add_argument("--ranks", nargs="*", type=int, help="numbers of ranks (default 1 2 4, quick 2)")
    options.add_argument("--rates", nargs="*", type=float, metavar="GBIT", help="links of two nodes (10 1)")
    options.add_argument(
        "--contestants",
        nargs="*",
        choices=sorted({*METHODS, *KERAS_METHODS}),
        help="with ours and gloo_ddp (all)",
    )
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    tidy_up_when_ended()
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    ranks = arguments.ranks if arguments.ranks is not None else (2,) if arguments.quick else (1, 2, 4)
    scenes = [Scene("node", count) for count in ranks]
    rates = arguments.rates if arguments.rates is not None else () if arguments.quick else RATES
    if can_be_made():
        scenes += [Scene(f"{rate:g}gbit", 2, gbit=rate) for rate in rates]
    elif rates:
        print("Two nodes need root, ip and tc: they are left out.", file=sys.stderr)
    rows = []
    for model in arguments.models or (QUICK if arguments.quick else BATCH):
        for fixture in scenes:
            rows += measure(model, fixture, rounds, arguments.steps, arguments.contestants)
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows)


@dataclass
class Turns:
    """What the contestants answered in all turns but the first, which warms up."""

    times: dict[str, list[float]] = field(default_factory=dict)  # ms of a step, by contestant
    used: dict[str, list[float]] = field(default_factory=dict)  # ms of processor time
    gradients: list[list[tuple[float, int]]] = field(default_factory=list)  # of ALONE
    communication: list[dict[str, float]] = field(default_factory=list)  # of CARME, without computing


def measure(
    model: str, scene: Scene, rounds: int, steps: int, chosen: list[str] | None
) -> list[dict[str, Any]]:
    """All contestants train `model`, or the chosen ones."""
    methods, own = (KERAS_METHODS, KERAS) if model.startswith("keras") else (METHODS, CARME)
    if chosen is not None:
        methods = tuple(name for name in methods if name in {*chosen, own, "gloo_ddp"})
    with contextlib.ExitStack() as stack:
        contestants = start_all(stack, model, scene, methods, own)
        turns = Turns()
        for turn in range(rounds + 1):
            losses = take_turn(contestants, turns, steps if turn else WARM_UP, is_warm_up=not turn)
            if scene.linked and not model.startswith("keras"):
                slowest = communicate_alone(contestants[CARME], turns, steps)
                # Before the first turn only to know how often.
                turns.communication = [*turns.communication, slowest] if turn > 1 else [slowest]
            expected = losses["gloo_ddp"]
            for name, loss in losses.items():
                if abs(loss - expected) > SAME_LOSS * abs(expected):
                    raise SystemExit(f"{name}: loss {loss} instead of {expected} with {model}")
    rows = [step_row(model, scene, methods, own, turns, steps), *hidden_rows(model, scene, own, turns)]
    for each in rows:
        print(json.dumps(each), file=sys.stderr, flush=True)
    return rows


def start_all(
    stack: contextlib.ExitStack, model: str, scene: Scene, methods: tuple[str, ...], own: str
) -> dict[str, Contestant]:
    """The contestants that could be started; `stack` ends them. Ours and Gloo must be among them."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    nodes = stack.enter_context(TwoNodes(scene.gbit, folder)) if scene.linked else None
    door = folder / "door"
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(door))
    listener.listen(256)
    contestants: dict[str, Contestant] = {}
    program, more = Path(__file__), {"CARME_BENCHMARK_MODEL": model}
    for name in methods if own == KERAS else (*methods, ALONE):
        if name != "horovod":
            contestants[name] = start(scene, name, door, nodes, program, more)
        elif has_horovod():
            contestants[name] = start_horovod(scene, door, nodes, program, more)
        else:
            continue
        stack.callback(contestants[name].end)
    if absent := admit(contestants, listener):
        logs = [(folder / f"{name}.log").read_text(errors="replace")[-2000:] for name in absent]
        message = f"These did not start: {', '.join(absent)}\n" + "\n".join(logs)
        if not {own, "gloo_ddp"} <= contestants.keys():
            raise SystemExit(message)
        print(message, file=sys.stderr)
    return contestants


def take_turn(
    contestants: dict[str, Contestant], turns: Turns, steps: int, *, is_warm_up: bool
) -> dict[str, float]:
    """Each contestant trains `steps` steps; their losses, all but that of ALONE."""
    losses = {}
    for name, contestant in contestants.items():
        answers = contestant.order({"steps": steps})
        if name != ALONE:
            losses[name] = statistics.mean(answer["loss"] for answer in answers)
        if is_warm_up:
            continue
        turns.times.setdefault(name, []).append(max(answer["ms"] for answer in answers))
        turns.used.setdefault(name, []).append(statistics.mean(answer["cpu_ms"] for answer in answers))
        if name == ALONE:
            turns.gradients.append(max(answers, key=lambda answer: answer["ms"])["gradients"])
    return losses


def communicate_alone(contestant: Contestant, turns: Turns, steps: int) -> dict[str, float]:
    """What the slowest rank answers when all do nothing but communicate."""
    often = steps
    if turns.communication:
        often = max(steps, round(COMMUNICATE_MS / turns.communication[-1]["ms"]))
    answers = contestant.order({"communicate": often})
    return max(answers, key=lambda answer: answer["ms"])


def step_row(
    model: str, scene: Scene, methods: tuple[str, ...], own: str, turns: Turns, steps: int
) -> dict[str, Any]:
    """The row of a model's step."""
    medians = {name: statistics.median(values) for name, values in turns.times.items()}
    alone, measured = medians.pop(ALONE, None), medians.pop(own)
    # Against others; not against our own other ways.
    best = min(value for name, value in medians.items() if not name.startswith("carme"))
    samples = BATCH[model] * scene.ranks * 1000
    suffix = f"{scene.ranks}_{scene.name}" if scene.linked else f"{scene.ranks}"
    return row(
        f"step_ms_{model}_{suffix}",
        "ms",
        measured,
        peers={name: medians.get(name) for name in methods if name != own},
        floor=alone,
        aim="faster than every peer" if scene.ranks > 1 else "",
        holds=measured < best if scene.ranks > 1 else None,
        # Of one rank, all its threads: what is wasted in waiting shows here also on a busy machine.
        cpu_ms={name: round(statistics.median(values), 1) for name, values in turns.used.items()},
        samples_per_second={
            name: round(samples / value, 1) for name, value in {own: measured, **medians}.items()
        },
        seconds_to_loss={
            name: round(sum(values) * steps / 1000, 3)
            for name, values in turns.times.items()
            if name != ALONE
        },
    )


def hidden_rows(model: str, scene: Scene, own: str, turns: Turns) -> list[dict[str, Any]]:
    """The row of what was hidden of the communication; none where hardly anything can be."""
    if ALONE not in turns.times or not turns.communication:
        return []
    medians = {name: statistics.median(values) for name, values in turns.times.items()}
    alone, measured = medians[ALONE], medians[own]
    alone_ms = statistics.median(each["ms"] for each in turns.communication)
    busy = statistics.median(each["busy_ms"] for each in turns.communication)
    created = [
        (statistics.median(at for at, _ in each), each[0][1]) for each in zip(*turns.gradients, strict=True)
    ]
    ideal = max(travelled(created, alone_ms), alone + busy)
    hideable = alone + alone_ms - ideal
    # Where hardly anything can be hidden, times differ by more than that from step to step.
    if hideable < LEAST_HIDEABLE * alone:
        return []

    def hidden(step: float) -> float:
        return 100 * (alone + alone_ms - step) / hideable

    share = hidden(measured)
    return [
        row(
            f"hidden_{model}_{scene.name}",
            "%",
            share,
            peers={name: hidden(medians[name]) for name in ("carme_overlap_step",) if name in medians},
            aim="at least 90 %",
            holds=share >= 90,
            computing_ms=alone,
            communicating_ms=alone_ms,
            busy_ms=busy,
            ideal_ms=ideal,
        )
    ]


def travelled(gradients: list[tuple[float, int]], whole: float) -> float:
    """When the last gradient is there, if each travels as soon as it can.

    Args:
        gradients: When each was made, in ms, and its bytes that travel, in the order in which they were made.
        whole: Milliseconds for all of them, one after the other.
    """
    total = sum(size for _, size in gradients)
    end = 0.0
    for at, size in gradients:
        end = max(end, at) + whole * size / total
    return end


# A rank


def work(name: str, door: str) -> None:
    """One rank of a contestant: trains as many steps as it is sent, until the connection closes."""
    pin()
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = os.environ["CARME_BENCHMARK_MODEL"]
    if kind.startswith("keras"):
        os.environ["KERAS_BACKEND"] = "torch"
    if name == KERAS:
        rank, step_all = prepare_keras(build(kind))
        shares = range(int(os.environ["WORLD_SIZE"]))  # a global batch is given to all ranks
        model, step = None, lambda _, x, y: (step_all(x, y), [])
    else:
        model, rank, step = prepare(name, build(kind))
        shares = range(rank, rank + 1)
    data = [torch.Generator().manual_seed(1 + each) for each in shares]
    connection = come_in(name, rank, door)
    while True:
        try:
            order = json.loads(read_line(connection))
        except (EOFError, OSError):
            os._exit(0)
        if "communicate" in order:
            answer = communicate(model, order["communicate"])
            connection.sendall(json.dumps(answer).encode() + b"\n")
            continue
        batches = [
            tuple(torch.cat(parts) for parts in zip(*(batch(kind, each) for each in data), strict=True))
            for _ in range(UNTIMED + order["steps"])
        ]
        for x, y in batches[:UNTIMED]:
            step(model, x, y)
        begin, used, loss = time.perf_counter(), time.process_time(), torch.zeros(())
        created: list[list[tuple[float, Any]]] = []
        for x, y in batches[UNTIMED:]:
            loss, gradients = step(model, x, y)
            created.append(gradients)
        took = (time.perf_counter() - begin) / order["steps"] * 1000
        used = (time.process_time() - used) / order["steps"] * 1000
        answer = {
            "ms": took,
            "cpu_ms": used,
            "loss": float(loss),
            "gradients": [
                (statistics.mean(at for at, _ in each), travelling(each[0][1].grad))
                for each in zip(*created, strict=True)
            ],
        }
        connection.sendall(json.dumps(answer).encode() + b"\n")


def travelling(gradient: Any) -> int:
    """Bytes of a gradient that ours sends: it leaves out blocks of 256 bytes that are zero."""
    import torch

    flat = gradient.detach().reshape(-1)
    whole = flat.numel() // 64 * 64
    return 256 * int(torch.count_nonzero(flat[:whole].view(-1, 64).any(dim=1))) + 4 * (flat.numel() - whole)


def communicate(model: Any, times: int) -> dict[str, float]:
    """Milliseconds of reducing all gradients of a parallelized model while nothing is computed.

    `busy_ms`: how long of it this rank's core was not idle.
    """
    buckets = next(hook.parallel._buckets for hook in model._forward_pre_hooks.values())
    begin, idle = time.perf_counter(), idle_seconds()
    for _ in range(times):
        for bucket in buckets:
            bucket.start(None)
        for bucket in buckets:
            bucket.finish()
    passed, idle = time.perf_counter() - begin, idle_seconds() - idle
    return {"ms": passed / times * 1000, "busy_ms": max(passed - idle, 0.0) / times * 1000}


def idle_seconds() -> float:
    """How long this rank's core was idle since the machine started: see proc_stat(5)."""
    (core,) = os.sched_getaffinity(0)
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            return (int(ticks[3]) + int(ticks[4])) / os.sysconf("SC_CLK_TCK")
    raise SystemExit(f"/proc/stat says nothing of core {core}.")


def build(kind: str) -> Any:
    """The model: 25 M parameters in an MLP, 3 M in a residual network, 5 M in a transformer."""
    if kind.startswith("keras"):
        return build_keras(kind)
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


def build_keras(kind: str) -> Any:
    """The same MLP, or a plain convolutional network of 1 M parameters, of Keras' layers."""
    import keras  # pyright: ignore[reportMissingImports]

    keras.utils.set_random_seed(0)
    layers = keras.layers
    if kind == "keras_mlp":
        body = [keras.Input((1024,)), *(layers.Dense(3072, activation="relu") for _ in range(3))]
    else:
        body = [
            keras.Input((32, 32, 3)),
            *(layers.Conv2D(n, 3, 2, padding="same", activation="relu") for n in (32, 64, 128, 256)),
            layers.GlobalAveragePooling2D(),
        ]
    return keras.Sequential([*body, layers.Dense(1000)])


def batch(kind: str, data: Any) -> tuple[Any, Any]:
    """Inputs and classes for one step of one rank."""
    import torch

    count = BATCH[kind]
    kind, of_keras = kind.removeprefix("keras_"), kind.startswith("keras")
    classes = torch.randint(0, 1000, (count,), generator=data)
    if kind == "mlp":
        return torch.randn(count, 1024, generator=data), classes
    if kind == "cnn":
        # Keras has the channels last.
        shape = (32, 32, 3) if of_keras else (3, 32, 32)
        return torch.randn(count, *shape, generator=data), classes
    return torch.randint(0, 4000, (count, 64), generator=data), classes


def prepare_keras(model: Any) -> tuple[int, Callable[[Any, Any], float]]:
    """This rank, and a step on a global batch by `carme_runtime.keras`, which gives its loss."""
    import keras  # pyright: ignore[reportMissingImports]

    import carme_runtime.keras as ck

    model = ck.Model(model)
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )

    def step(x: Any, y: Any) -> float:
        # Keras' own metric is a mean over all steps since it was set back.
        model.reset_metrics()
        return float(model.train_on_batch(x.numpy(), y.numpy()))

    return ck.get_rank(), step


def prepare(name: str, model: Any) -> tuple[Any, int, Callable[[Any, Any, Any], Any]]:
    """The model made ready for a way of training, this rank, and what one step is."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name in ("gloo_ddp", "carme_ddp"):
        dist.init_process_group(name.partition("_")[0])
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif name in (CARME, "carme_overlap_step"):
        from carme_runtime.torch import parallelize

        model, optimizer = parallelize(model, optimizer, overlap_step=name != CARME)
    elif name != ALONE:
        hvd = importlib.import_module("carme_runtime.horovod" if name == "carme_horovod" else "horovod.torch")
        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    created: list[tuple[float, Any]] = []  # when the gradient of each parameter was there
    if name == ALONE:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: created.append((time.perf_counter(), p)))

    def step(model: Any, x: Any, y: Any) -> Any:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        created.clear()
        loss.backward()
        optimizer.step()
        return loss.detach(), [(1000 * (at - begin), parameter) for at, parameter in created]

    return model, rank, step


if __name__ == "__main__":
    main()
