"""Compares the steps that carme_runtime.scaling predicts for two ranks with steps that two ranks make.

    sudo ./test bench scaling --quick
    sudo ./test bench scaling --json result.json

In each round ranks probe their model, the links, and what reducing takes from computing; then they train it:
both see the same minute. Two ranks with one thread and one core each, on one node and on two
(network namespaces, which take root) at 1 and 10 Gbit/s. `simple` is T = G/W + C(W) of the same probes: the
time of the batch, divided by the ranks, and of reducing it all afterwards.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from allreduce import free_port
from allreduce_ranks import pin
from report import print_table, row, tidy_up_when_ended, write_json
from training import build
from two_nodes import TwoNodes, can_be_made

RANKS = 2
BATCH = {"mlp": 64, "cnn": 32, "transformer": 16}  # of both ranks
START_SECONDS = 1800
NODE = "node"


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--models", nargs="+", choices=[*BATCH], default=[*BATCH])
    options.add_argument("--rates", nargs="+", choices=["1", "10", NODE], help="Gbit/s between two nodes")
    options.add_argument("--rounds", type=int, help="of each model and rate: 8, or 3 with --quick")
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 8)
    if arguments.worker:
        file, rate = arguments.worker
        return work(Path(file), arguments.models, rounds, several=rate != NODE)
    tidy_up_when_ended()
    rates = arguments.rates or [NODE, "10", "1"]
    if any(rate != NODE for rate in rates) and not can_be_made():
        print("Two nodes take root, ip, tc and unshare: one node alone is measured.", file=sys.stderr)
        rates = [NODE]
    found = {rate: run(rate, arguments.models, rounds) for rate in rates}
    rows = table(found)
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows, rounds=found)


def run(rate: str, models: list[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """The rounds of each model with one rate."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = stack.enter_context(TwoNodes(float(rate), folder)) if rate != NODE else None
        key, result = folder / "key", folder / "result.json"
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        command = [sys.executable, __file__, "--worker", str(result), rate, "--models", *models]
        command += ["--rounds", str(rounds)]
        port, ranks = free_port(), []
        for rank in range(RANKS):
            own = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "MASTER_PORT": port}
            own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
            if nodes:
                own |= {"MASTER_ADDR": nodes.addresses[0], "CARME_ADDRESS": nodes.addresses[rank]}
                own |= {"CARME_KEY_FILE": key, "LOCAL_RANK": 0}
            prefix = nodes.on(rank) if nodes else []
            environment = os.environ | {name: str(value) for name, value in own.items()}
            ranks.append(subprocess.Popen([*prefix, *command], env=environment))
        try:
            for process in ranks:
                if process.wait(START_SECONDS):
                    raise SystemExit("A rank failed; see above.")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return json.loads(result.read_text())


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """A row of each model and rate, and what they come to together."""
    rows, rounds = [], []
    for rate, models in found.items():
        for model, several in models.items():
            rounds += several
            middle = {name: statistics.median(one[name] for one in several) for name in several[0]}
            rows.append(
                row(
                    f"predicted_step_ms_{model}_{RANKS}_{rate if rate == NODE else rate + 'gbit'}",
                    "ms",
                    middle["predicted"],
                    peers={"measured": middle["measured"], "simple": middle["simple"]},
                    low=middle["low"],
                    high=middle["high"],
                )
            )
    errors, simple = (
        sorted(100 * abs(one[name] / one["measured"] - 1) for one in rounds)
        for name in ("predicted", "simple")
    )
    middle, ninety = statistics.median(errors), errors[min(int(0.9 * len(errors)), len(errors) - 1)]
    covered = 100 * statistics.mean(one["low"] <= one["measured"] <= one["high"] for one in rounds)
    peers = {"simple": statistics.median(simple)}
    ratio = peers["simple"] / middle
    return [
        *rows,
        row("error_median", "%", middle, peers=peers, aim="at most 8 %", holds=middle <= 8),
        row("error_90th", "%", ninety, aim="at most 20 %", holds=ninety <= 20),
        row("simple_by_ours", "times", ratio, aim="at least 3 times the error", holds=ratio >= 3),
        row("coverage", "%", covered, aim="75 to 90 % of the runs", holds=75 <= covered <= 90),
    ]


# What each rank does


def work(file: Path, models: list[str], rounds: int, several: bool) -> None:
    """All models, one after the other; in each round first the probe, then the steps."""
    import torch
    import torch.distributed as dist

    pin()
    torch.set_num_threads(1)
    dist.init_process_group("carme")
    result: dict[str, list[dict[str, float]]] = {}
    for model in models:
        torch.manual_seed(0)
        contest = Contest(model, several)
        contest.trained()  # warms both up
        result[model] = [contest.round() for _ in range(rounds)]
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


class Contest:
    """One model, to be probed and to be trained."""

    def __init__(self, kind: str, several: bool) -> None:
        import torch
        from torch.nn import functional

        from carme_runtime.torch import parallelize
        from carme_runtime.torch.pipeline_run import Run

        self.batch, self.loss, self.run = BATCH[kind], functional.cross_entropy, Run()
        self.several = several  # nodes, each with a rank
        shape = {"mlp": (1024,), "cnn": (3, 32, 32)}.get(kind)
        self.inputs = torch.randn(self.batch, *shape) if shape else torch.randint(0, 4000, (self.batch, 64))
        self.targets = torch.randint(0, 1000, (self.batch,))
        self.probed, self.model = build(kind), build(kind)
        self.probed_optimizer = torch.optim.SGD(self.probed.parameters(), 0.001, momentum=0.9, fused=True)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.001, momentum=0.9)
        self.model, self.optimizer = parallelize(self.model, optimizer)

    def round(self) -> dict[str, float]:
        """What is predicted, and what is measured right after it."""
        import torch.distributed as dist

        from carme_runtime.scaling import predict
        from carme_runtime.scaling.advice import measure
        from carme_runtime.scaling.machines import machine_of
        from carme_runtime.scaling.network import allreduce_ms

        dist.barrier()
        machine = machine_of(self.run, 1 if self.several else RANKS, self.compute)
        dist.barrier()
        batch = (self.inputs, self.targets)
        profile = measure(self.probed, batch, self.loss, optimizer=self.probed_optimizer, seconds=4)
        point = predict(profile, machine, RANKS).strong[-1]
        alone = profile.forward_ms(self.batch) + profile.backward_ms(self.batch)
        simple = (alone + profile.fixed_ms) / RANKS + allreduce_ms(machine, RANKS, profile.bytes)[0]
        figures = {"predicted": point.step.ms, "low": point.low, "high": point.high, "simple": simple}
        parts = {"compute": point.step.compute, "communication": point.step.communication}
        parts |= {"fixed": point.step.fixed, "host_ms_per_mib": machine.host_ms_per_mib}
        return figures | {"measured": self.trained()} | parts

    def compute(self) -> None:
        """The passes of the model that is probed, with this rank's share of the batch."""
        inputs, targets = self.share()
        self.probed.zero_grad()
        self.loss(self.probed(inputs), targets).backward()

    def share(self) -> tuple[Any, Any]:
        """Of the batch, for this rank."""
        import torch.distributed as dist

        part = slice(dist.get_rank(), None, RANKS)
        return self.inputs[part], self.targets[part]

    def trained(self, steps: int = 14) -> float:
        """Milliseconds of a step, each rank with its share of the batch."""
        import torch.distributed as dist

        inputs, targets = self.share()
        times = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            self.optimizer.zero_grad()
            self.loss(self.model(inputs), targets).backward()
            self.optimizer.step()
            times.append((time.perf_counter() - began) * 1000)
        return statistics.median(times[2:])


if __name__ == "__main__":
    main()
