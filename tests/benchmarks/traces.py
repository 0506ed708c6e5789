"""What recording costs a training step: two ranks, with and without, in turns.

    ./test bench traces --quick
    ./test bench traces --json result.json

In each round both ranks make the same steps without a recording and with one, in an order that changes.
We report the median and the quartiles of the rounds' ratios: of the time on the clock, and of the main
thread's own time, which other programs on the computer disturb less. `core_event_ns` is what an event with
its two times costs a thread in the core (recorder_speed of containers/runtime/native/tests);
the peer is the writer of PyPI's otf2, which records in Python.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import print_table, row, write_json

MODELS = {"mlp": (2048, 6, 64), "deep": (256, 48, 64)}  # width, layers, samples of each rank
START_SECONDS = 1800
#: The most nanoseconds of an event in the core; how many of the peer's are timed.
MOST_NS, PEER_EVENTS = 200, 50_000
NATIVE = Path(__file__).parents[2] / "containers/runtime/native"


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    rounds = 8 if arguments.quick else 30
    if arguments.worker:
        return work(arguments.worker[0], Path(arguments.worker[1]), rounds)
    rows = []
    for model in MODELS:
        found = run(model, arguments.quick)
        for measure in ("clock", "own"):
            ratios = [on[measure] / off[measure] for off, on in found["rounds"]]
            low, middle, high = statistics.quantiles(ratios, n=4)
            name = f"{model}_{measure}_ratio"
            rows.append(
                row(name, "", middle, aim="at most 1.01", holds=middle <= 1.01, quartiles=[low, high])
            )
            print(f"{name}: {middle:.4f} ({low:.4f} to {high:.4f}), {len(ratios)} rounds")
        rows.append(row(f"{model}_events_of_a_step", "", found["events"]))
    rows += event_rows()
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows)
    return None


def event_rows() -> list[dict[str, Any]]:
    """Nanoseconds of an event; none where there is no compiler, and no peer where otf2 is missing."""
    if shutil.which("c++") is None:
        print("traces: there is no c++; the row of one event is left out.", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as name:
        folder, program = Path(name), Path(name, "recorder_speed")
        sources = [NATIVE / "tests/recorder_speed.cpp", NATIVE / "src/recorder.cpp"]
        build = ["c++", "-O3", "-std=c++20", "-pthread", f"-I{NATIVE / 'src'}", "-o", program, *sources]
        subprocess.run(build, check=True, timeout=START_SECONDS)
        command = [program, folder / "recording"]
        printed = subprocess.run(
            command, check=True, timeout=START_SECONDS, stdout=subprocess.PIPE, text=True
        )
        measured = float(printed.stdout.split()[0])
        try:
            peers = {"otf2": otf2_event_ns(folder / "archive")}
        except ImportError:
            peers = {}
    aim = f"at most {MOST_NS}"
    return [row("core_event_ns", "ns", measured, peers=peers, aim=aim, holds=measured <= MOST_NS)]


def otf2_event_ns(folder: Path) -> float:
    """The same of PyPI's otf2: of this thread's time, for a region that is entered and left."""
    import otf2

    with otf2.writer.open(str(folder), timer_resolution=10**9) as trace:
        region = trace.definitions.region("region")
        node = trace.definitions.system_tree_node("node")
        process = trace.definitions.location_group("process", system_tree_parent=node)
        writer = trace.event_writer("thread", group=process)
        began = time.thread_time()
        for _ in range(PEER_EVENTS):
            writer.enter(time.perf_counter_ns(), region)
            writer.leave(time.perf_counter_ns(), region)
        return (time.thread_time() - began) / PEER_EVENTS * 1e9


def run(model: str, quick: bool) -> dict[str, Any]:
    """Rounds of seconds of a step, without a recording and with one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "carme_runtime.launcher.command",
            "-n",
            "2",
            "-x",
            "OMP_NUM_THREADS=1",
        ]
        command += [__file__, "--worker", model, folder, *(["--quick"] if quick else [])]
        subprocess.run(command, check=True, timeout=START_SECONDS)
        return json.loads((Path(folder) / "result.json").read_text())


def work(model: str, folder: Path, rounds: int) -> None:
    """Of one rank."""
    import torch
    import torch.distributed as dist

    from carme_runtime import profile
    from carme_runtime.traces import phases

    dist.init_process_group("carme")
    rank, (width, depth, samples) = dist.get_rank(), MODELS[model]
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(network.parameters(), 1e-6)
    batch = torch.randn(samples, width)
    phases.watch()

    def steps(count: int = 5) -> dict[str, float]:
        dist.barrier()
        clock, own = time.perf_counter(), time.thread_time()
        for _ in range(count):
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()
        return {"clock": (time.perf_counter() - clock) / count, "own": (time.thread_time() - own) / count}

    def recorded() -> dict[str, float]:
        nonlocal events
        profile.recorder = profile.Recorder(None, rank, folder)
        result = steps()
        profile.recorder.write()
        events = profile.recorder.written / 5
        profile.recorder = None
        return result

    events = 0.0
    profile.recorder = None
    steps()
    found = []
    for number in range(rounds):
        if number % 2:
            on = recorded()
            found.append((steps(), on))
        else:
            off = steps()
            found.append((off, recorded()))
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"rounds": found, "events": events}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
