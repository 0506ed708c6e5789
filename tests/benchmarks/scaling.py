"""Compares the steps that carme_runtime.scaling predicts for two ranks with steps that two ranks make.

    sudo ./test bench scaling --quick
    sudo ./test bench scaling --json result.json
    sudo ./test bench scaling --quick --ranks 2 4
    sudo ./test bench scaling --nodes demo --json result.json   # between the demo's two nodes

In each round ranks measure the links and what reducing takes from computing, and probe their model. They
train it before, between and after that: all see the same minute, and what changes meanwhile is on all sides.
The prediction is the mean of those by the profiles of all ranks, so that it has the noise of all, not of one.
Two ranks with one thread and one core each, on one node and on two (network namespaces, which take root) at 1
and 10 Gbit/s. `simple` is T = G/W + C(W) of the same probes: the time of the batch, divided by the ranks, and
of reducing it all afterwards.

With more ranks than cores each rank has a cgroup in which it computes for the same part of a core's time,
from the probe on, and a node of its own at a switch. All numbers of ranks have that part. With several of
them the knee is judged as well: for each round the most ranks above some efficiencies, and the most for
which a doubling still makes training 1.25 times as fast. knee_within_a_step is how many of the predicted ones
are at most one step of 2 from the measured ones.

coverage is the part of the rounds whose step is in its 80 % interval. `low` and `high` in the JSON are its
95 % bounds by the binomial distribution (Clopper and Pearson), as if rounds were independent; those of one
model are less than that. The aim holds unless the bounds are beside it: 18 of 18 rounds may be one chance in
seven of an interval that covers 90 %. So interval_width is the mean width as a part of what is predicted,
and `needed` of the same intervals, all made so much wider or narrower that they hold 80 % of the rounds.

Between the demo's nodes there are three rounds, or as many as nine minutes take (`--minutes`), and one at
least. What is known so far is in the JSON after each rate; `complete` says whether it is all.

probe_seconds_<model> is how long `carme-run -n 1 --scale-probe` takes for a script that trains the model,
from its start to its end. Each round is shown as soon as it has ended.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allreduce import NODES, free_port
from allreduce_ranks import pin
from intervals import judged_intervals
from report import print_table, row, tidy_up_when_ended, write_json
from training import build
from two_nodes import SwitchedNodes, can_be_made, find_demo_nodes

from carme_runtime.scaling.prediction import knee_of, most_of

BATCH = {"mlp": 64, "cnn": 32, "transformer": 16}  # of all ranks
SLOWEST = "transformer"
LONGEST_PROBE = 120.0  # seconds
#: Of the probe of a round, with whole cores: half a core takes twice as long for as much.
PROBE_SECONDS = 8.0
#: Of steps before, within and after the probe of a round, with at least and at most so many: fast ones take
#: too short a part of a round else, and what is measured has the noise of a moment.
TURN_SECONDS, FEWEST, MOST = 2.0, 6, 30
WARM = 2  # steps of each of these that do not count
EFFICIENCIES = (0.3, 0.5, 0.7, 0.9)  # above which the most ranks are looked for
USED = 0.8  # of the cores' time, where ranks have parts of cores: the rest is the network's
START_SECONDS = 1800
DEMO_MINUTES = 9.0  # of all of it between the demo's nodes
NODE = "node"

Rounds = list[dict[str, float]]
Found = dict[int, dict[str, dict[str, Rounds]]]  # by ranks, rate and model


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = parser()
    arguments = options.parse_args()
    if arguments.train:
        return train(arguments.train)
    counts = sorted(set(arguments.ranks))
    if counts[0] < 2 or any(batch % count for count in counts for batch in BATCH.values()):
        options.error(f"--ranks {' '.join(map(str, counts))}: give 2, 4, 8 or 16")
    few = 2 if len(counts) > 1 else 3
    rounds = arguments.rounds or (few if arguments.quick or arguments.nodes == "demo" else 8)
    if arguments.worker:
        return work(arguments, rounds, is_alone_timed=len(counts) > 1)
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        options.error(f"--json {arguments.json}: there is no such folder")
    tidy_up_when_ended()
    cores = len(os.sched_getaffinity(0))
    part = USED * cores / counts[-1] if counts[-1] > cores else None
    is_demo = arguments.nodes == "demo"
    if is_demo and (counts != [2] or part is not None):
        options.error("--nodes demo: two ranks, with a core each")
    if is_demo and not can_be_made():
        options.error("--nodes demo takes root, ip, tc and unshare")
    if is_demo:
        find_demo_nodes()  # before anything takes time
    measure(arguments, counts, rounds, part)


def measure(arguments: argparse.Namespace, counts: list[int], rounds: int, part: float | None) -> None:
    """Measure all of it; what is known so far is in the JSON after each rate.

    Args:
        arguments: The options.
        counts: Numbers of ranks.
        rounds: Of each model and rate, unless time is short.
        part: Of a core's time that each rank has; None: a core.
    """
    kind, is_demo = arguments.nodes, arguments.nodes == "demo"
    usual = ["10", "1"] if is_demo or part is not None else [NODE, "10", "1"]
    rates = arguments.rates or usual
    if any(rate != NODE for rate in rates) and not can_be_made():
        print("Several nodes take root, ip, tc and unshare: one node alone is measured.", file=sys.stderr)
        rates = [NODE]
    probed = arguments.probes
    if probed is None:
        probed = [SLOWEST] if arguments.quick or is_demo else list(BATCH)
    minutes = arguments.minutes or (DEMO_MINUTES if is_demo else math.inf)
    until = time.monotonic() + 60 * minutes - LONGEST_PROBE * len(probed)
    # Numbers of ranks one after the other, so that a knee is of few minutes.
    runs = [(rate, count) for rate in rates for count in counts]
    show(
        f"rates {', '.join(rates)}; {rounds} rounds of {', '.join(arguments.models)}"
        + (f", or fewer within {minutes:g} minutes" if minutes < math.inf else "")
    )
    passed = ["--models", *arguments.models, "--rounds", str(rounds), "--ranks", *map(str, counts)]
    passed += ["--part", str(part or 1)]
    found: Found = {count: {} for count in counts}

    def write(rows: list[dict[str, Any]], is_complete: bool) -> None:
        if arguments.json:
            shown = {str(count): several for count, several in found.items()}
            more = {"part_of_a_core": part or 1, "nodes": kind, "complete": is_complete}
            write_json(arguments.json, rows, rounds=shown, **more)

    for number, (rate, count) in enumerate(runs):
        seconds = max(until - time.monotonic(), 0.0) / (len(runs) - number)
        show(f"run {number + 1} of {len(runs)}: {count} ranks, {rate if rate == NODE else rate + ' Gbit/s'}")
        found[count][rate] = run(count, rate, [*passed, "--seconds", str(seconds)], part, kind)
        if count == counts[-1]:
            write(table(found, {}), False)
    rows = table(found, {model: probe_seconds(model) for model in probed})
    print_table(rows)
    write(rows, True)


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--models", nargs="+", choices=[*BATCH], default=[*BATCH])
    options.add_argument("--rates", nargs="+", type=rate_of, help=f"Gbit/s between nodes, or '{NODE}': none")
    options.add_argument("--ranks", nargs="+", type=int, default=[2], help="numbers of ranks (default: 2)")
    options.add_argument(
        "--nodes", choices=[*NODES], default="namespaces", help="of two ranks; demo: the demo's network"
    )
    options.add_argument(
        "--rounds",
        type=int,
        help="of each model and rate: 8; with --quick or --nodes demo 3, or 2 with several numbers of ranks",
    )
    options.add_argument(
        "--minutes",
        type=float,
        help=f"for all of it, with one round at least (default: with --nodes demo {DEMO_MINUTES:g})",
    )
    options.add_argument(
        "--probes",
        nargs="*",
        choices=[*BATCH],
        help="models of which a probe's time is measured (default: all; with --quick or --nodes demo "
        f"{SLOWEST})",
    )
    options.add_argument("--part", type=float, default=1.0, help=argparse.SUPPRESS)
    options.add_argument("--seconds", type=float, default=math.inf, help=argparse.SUPPRESS)
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--train", choices=[*BATCH], help=argparse.SUPPRESS)
    return options


def show(text: str) -> None:
    """Say how far it is."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def rate_of(text: str) -> str:
    """A rate in Gbit/s, or none within a node. Raises ValueError."""
    if text != NODE and not 0 < float(text) < math.inf:
        raise ValueError(text)
    return text


def run(count: int, rate: str, passed: list[str], part: float | None, kind: str) -> dict[str, Rounds]:
    """The rounds of each model with one rate.

    Args:
        count: Ranks.
        rate: Between their nodes.
        passed: Options that ranks get.
        part: Of a core's time that each rank has; None: a core.
        kind: Of nodes.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = None
        if rate != NODE:
            pair = count == 2 and part is None
            network = NODES[kind](float(rate), folder) if pair else SwitchedNodes(count, float(rate), folder)
            nodes = stack.enter_context(network)
        key, result = folder / "key", folder / "result.json"
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        command = [sys.executable, __file__, "--worker", str(result), rate, *passed]
        port, ranks = free_port(), []
        for rank in range(count):
            own = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "MASTER_PORT": port}
            own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
            if nodes:
                own |= {"MASTER_ADDR": nodes.addresses[0], "CARME_ADDRESS": nodes.addresses[rank]}
                own |= {"CARME_KEY_FILE": key, "LOCAL_RANK": 0}
            prefix = nodes.on(rank) if nodes else []
            environment = os.environ | {name: str(value) for name, value in own.items()}
            enter = limited(part, stack) if part else None
            ranks.append(subprocess.Popen([*prefix, *command], env=environment, preexec_fn=enter))
        try:
            wait_for(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return json.loads(result.read_text())


def wait_for(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait until all have ended. Raises SystemExit as soon as one fails: the others would wait for it."""
    until = time.monotonic() + START_SECONDS
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        if time.monotonic() > until:
            raise SystemExit(f"The ranks took more than {START_SECONDS} s.")
        time.sleep(0.1)
    if any(codes):
        raise SystemExit("A rank failed; see above.")


def probe_seconds(model: str) -> float:
    """How long a probe of a script takes that trains this model. Raises SystemExit where it fails."""
    show(f"{model}: the probe of a script")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from carme_runtime.commands import run; run()"]
        command += ["-n", "1", "--scale-probe", "--scale-result", f"{folder}/scale.json"]
        began = time.monotonic()
        done = subprocess.run([*command, __file__, "--train", model], stdout=subprocess.DEVNULL)
        took = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"The probe of {model} failed; see above.")
    return took


def limited(part: float, stack: contextlib.ExitStack) -> Callable[[], None]:
    """What lets a rank compute for a part of a core's time. Raises SystemExit where that cannot be had."""
    from cgroups import part_of_a_core

    try:
        return stack.enter_context(part_of_a_core(part))
    except OSError as error:
        raise SystemExit(f"More ranks than cores take cgroups, which cannot be made here: {error}.") from None


def table(found: Found, probes: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row of each model, number of ranks and rate, and what they come to together.

    Args:
        found: The rounds.
        probes: Seconds of a probe, by model.
    """
    rows, rounds = [], []
    each = [
        (count, rate, model, several)
        for count, rates in found.items()
        for rate, models in rates.items()
        for model, several in models.items()
    ]
    for count, rate, model, several in each:
        rounds += several
        middle = {name: statistics.median(figures[name] for figures in several) for name in several[0]}
        rows.append(
            row(
                f"predicted_step_ms_{model}_{count}_{rate if rate == NODE else rate + 'gbit'}",
                "ms",
                middle["predicted"],
                peers={"measured": middle["measured"], "simple": middle["simple"]},
                low=middle["low"],
                high=middle["high"],
            )
        )
    errors, simple = (
        sorted(100 * abs(figures[name] / figures["measured"] - 1) for figures in rounds)
        for name in ("predicted", "simple")
    )
    middle, ninety = statistics.median(errors), errors[min(int(0.9 * len(errors)), len(errors) - 1)]
    peers = {"simple": statistics.median(simple)}
    ratio = peers["simple"] / middle
    return [
        *rows,
        row("error_median", "%", middle, peers=peers, aim="at most 8 %", holds=middle <= 8),
        row("error_90th", "%", ninety, aim="at most 20 %", holds=ninety <= 20),
        row("simple_by_ours", "times", ratio, aim="at least 3 times the error", holds=ratio >= 3),
        *judged_intervals(rounds),
        *(
            row(
                f"probe_seconds_{model}",
                "s",
                took,
                aim=f"at most {LONGEST_PROBE:.0f} s",
                holds=took <= LONGEST_PROBE,
            )
            for model, took in probes.items()
        ),
        *(judged_knees(found) if len(found) > 1 else []),
    ]


def judged_knees(found: Found) -> list[dict[str, Any]]:
    """How many of the predicted knees are those that were measured, or one step of 2 from them."""
    first = next(iter(found.values()))
    places = [
        (rate, model, number)
        for rate, models in first.items()
        for model in models
        # Where time was short, some numbers of ranks may have fewer.
        for number in range(min(len(rates[rate][model]) for rates in found.values()))
    ]
    known = {name: [] for name in ("measured", "predicted", "simple")}
    for rate, model, number in places:
        turns = {count: rates[rate][model][number] for count, rates in found.items()}
        for name, several in known.items():
            alone = "alone" if name == "measured" else f"{name}_alone"
            several += knees({1: 1.0} | {n: figures[alone] / figures[name] for n, figures in turns.items()})
    shares = {
        name: [abs(math.log2(carme / real)) for carme, real in zip(several, known["measured"], strict=True)]
        for name, several in known.items()
    }

    def share(name: str, most: float) -> float:
        return 100 * statistics.mean(steps <= most for steps in shares[name])

    # So that a reader sees whether they were anywhere else than at one end.
    measured = {str(count): known["measured"].count(count) for count in (1, *found)}
    near, peers = share("predicted", 1), {"simple": share("simple", 1)}
    aim = "all within one step of 2"
    return [
        row("knee_within_a_step", "%", near, peers=peers, aim=aim, holds=near == 100, measured=measured),
        row("knee_exact", "%", share("predicted", 0), peers={"simple": share("simple", 0)}),
    ]


def knees(speedups: dict[int, float]) -> list[int]:
    """The most ranks above each efficiency, and the most for which the last doubling is of use."""
    return [*(most_of(speedups, efficiency) for efficiency in EFFICIENCIES), knee_of(speedups)]


# What each rank does


def work(arguments: argparse.Namespace, rounds: int, is_alone_timed: bool) -> None:
    """All models, one after the other; in each round the probe between two halves of the steps.

    Args:
        arguments: The options; each model has one round at least, whatever the time.
        rounds: Of each, unless time is short.
        is_alone_timed: Whether each rank also makes steps for itself, from which speed-ups are counted.
    """
    import torch
    import torch.distributed as dist

    file, rate = arguments.worker
    models = arguments.models
    until = time.monotonic() + arguments.seconds
    pin()
    torch.set_num_threads(1)
    dist.init_process_group("carme")
    result: dict[str, list[dict[str, float]]] = {}
    for place, model in enumerate(models):
        began = time.monotonic()
        model_until = began + (until - began) / (len(models) - place)
        torch.manual_seed(0)
        contest = Contest(model, rate != NODE, is_alone_timed, PROBE_SECONDS / arguments.part)
        contest.warm_up()
        result[model] = []
        for number in range(1, rounds + 1):
            round_began = time.monotonic()
            found = contest.round()
            result[model].append(found)
            took = time.monotonic() - round_began
            if contest.rank == 0:
                where = f"{model}, {contest.ranks} ranks, {rate}, round {number} of {rounds}"
                times = f"{found['predicted']:.0f} ms predicted, {found['measured']:.0f} ms measured"
                show(f"{where}: {times} ({took:.0f} s)")
            if not all_have_time(time.monotonic() + took <= model_until):
                break
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(result))
    dist.destroy_process_group()


def all_have_time(is_mine: bool) -> bool:
    """Whether no rank is late; all call this together, so that all make as many rounds."""
    import torch
    import torch.distributed as dist

    late = torch.tensor([0.0 if is_mine else 1.0])
    dist.all_reduce(late)
    return not late.item()


def samples_of(kind: str, count: int) -> tuple[Any, Any]:
    """Inputs of a model, and their classes."""
    import torch

    shape = {"mlp": (1024,), "cnn": (3, 32, 32)}.get(kind)
    inputs = torch.randn(count, *shape) if shape else torch.randint(0, 4000, (count, 64))
    return inputs, torch.randint(0, 1000, (count,))


def train(kind: str) -> None:
    """Train a model until the probe ends it, as a script does that knows nothing of probes."""
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    loader = DataLoader(TensorDataset(*samples_of(kind, 8 * BATCH[kind])), BATCH[kind])
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


class Contest:
    """One model, to be probed and to be trained."""

    def __init__(self, kind: str, several: bool, is_alone_timed: bool, seconds: float) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn import functional

        from carme_runtime.torch import parallelize
        from carme_runtime.torch.pipeline_run import Run

        self.rank, self.ranks, self.is_alone_timed = dist.get_rank(), dist.get_world_size(), is_alone_timed
        self.batch, self.loss, self.run = BATCH[kind], functional.cross_entropy, Run()
        self.several = several  # nodes, each with a rank
        self.seconds = seconds  # of a probe
        self.steps = FEWEST
        self.inputs, self.targets = samples_of(kind, self.batch)
        self.probed, self.model = build(kind), build(kind)
        self.probed_optimizer = torch.optim.SGD(self.probed.parameters(), 0.001, momentum=0.9, fused=True)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.001, momentum=0.9)
        self.model, self.optimizer = parallelize(self.model, optimizer)

    def warm_up(self) -> None:
        """Make the first steps, and choose how many are measured at a time: the same on all ranks."""
        import torch
        import torch.distributed as dist

        took = torch.tensor([statistics.median(self.trained())])
        dist.all_reduce(took)
        wanted = math.ceil(1000 * TURN_SECONDS * self.ranks / took.item())
        self.steps = min(max(wanted, FEWEST), MOST)

    def round(self) -> dict[str, float]:
        """What is predicted, and what is measured before, between and after what it is predicted by."""
        import torch.distributed as dist

        from carme_runtime.scaling.advice import measure
        from carme_runtime.scaling.machines import machine_of
        from carme_runtime.scaling.sampling import drift, spread

        alone = self.alone() if self.is_alone_timed else []
        trained = self.trained()
        dist.barrier()
        machine = machine_of(self.run, 1 if self.several else self.ranks, self.compute)
        trained += self.trained()
        dist.barrier()
        batch = (self.inputs, self.targets)
        profile = measure(
            self.probed, batch, self.loss, optimizer=self.probed_optimizer, seconds=self.seconds
        )
        profiles: list[Any] = [None] * self.ranks
        dist.all_gather_object(profiles, profile)
        of_ranks = [self.predicted(each, machine) for each in profiles]
        figures = {name: statistics.mean(each[name] for each in of_ranks) for name in of_ranks[0]}
        figures |= {f"predicted_by_{rank}": each["predicted"] for rank, each in enumerate(of_ranks)}
        figures |= {"host_ms_per_mib": machine.host_ms_per_mib}
        figures |= {"gathering_ms_per_mib": machine.gathering_ms_per_mib}
        if self.is_alone_timed:
            figures["alone"] = statistics.median([*alone, *self.alone()])
        trained += self.trained()
        figures |= {"measured_spread": spread(trained), "measured_drift": drift(trained)}
        return figures | {"measured": statistics.median(trained)}

    def predicted(self, profile: Any, machine: Any) -> dict[str, float]:
        """What a rank's profile predicts, with all parts of it."""
        from carme_runtime.scaling import predict
        from carme_runtime.scaling.network import allreduce_ms

        alone, *_, point = predict(profile, machine, self.ranks).strong
        whole = profile.forward_ms(self.batch) + profile.backward_ms(self.batch) + profile.fixed_ms
        simple = whole / self.ranks + allreduce_ms(machine, self.ranks, profile.bytes)[0]
        figures = {"predicted": point.step.ms, "low": point.low, "high": point.high, "simple": simple}
        figures |= {"compute": point.step.compute, "communication": point.step.communication}
        figures |= {"fixed": point.step.fixed, "spread": profile.spread, "drift": profile.drift}
        if self.is_alone_timed:
            figures |= {"predicted_alone": alone.step.ms, "simple_alone": whole}
        return figures

    def compute(self) -> None:
        """The passes of the model that is probed, with this rank's share of the batch."""
        inputs, targets = self.share()
        self.probed.zero_grad()
        self.loss(self.probed(inputs), targets).backward()

    def share(self) -> tuple[Any, Any]:
        """Of the batch, for this rank."""
        part = slice(self.rank, None, self.ranks)
        return self.inputs[part], self.targets[part]

    def trained(self) -> list[float]:
        """Milliseconds of steps, each rank with its share of the batch."""
        return self.timed(self.model, self.optimizer, *self.share())

    def alone(self) -> list[float]:
        """Milliseconds of steps with the whole batch; all ranks make them beside each other."""
        return self.timed(self.probed, self.probed_optimizer, self.inputs, self.targets)

    def timed(self, model: Any, optimizer: Any, inputs: Any, targets: Any) -> list[float]:
        """Milliseconds of steps that all ranks begin together, but for the first ones."""
        import torch.distributed as dist

        times = []
        for _ in range(WARM + self.steps):
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            self.loss(model(inputs), targets).backward()
            optimizer.step()
            times.append((time.perf_counter() - began) * 1000)
        return times[WARM:]


if __name__ == "__main__":
    main()
