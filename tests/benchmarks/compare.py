"""`carme compare` with all that this environment has, twice, and whether it finds what it must.

    ./test bench compare --quick
    ./test bench compare --json result.json --keep folder

The rows step_ms_<network>_<ranks> are of the first comparison: `ours` is parallelize. repeated_<network> is
how far the medians of the second one are from those of the first, in the median over contestants and ranks.
In the second one Gloo is made 10 % slower on purpose, and found_slower is by how many percent it was found to
be. The third one has a neighbour that keeps all cores busy, so all of its turns are disturbed:
marked_disturbed is the share of them that it has marked.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import print_table, row, tidy_up_when_ended, write_json

from carme_runtime.compare import Result, load
from carme_runtime.compare.figures import ratio

OURS, SLOWED, PERCENT = "parallelize", "torch-gloo", 10.0
NEIGHBOURED = (SLOWED, OURS)  # who has the neighbour; two are enough for dozens of turns
STEADY = "horovod-face"  # what the slowed one is compared with, before and after


def main() -> None:
    """Compare twice, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="small networks, few rounds")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="leave both comparisons there")
    arguments = options.parse_args()
    tidy_up_when_ended()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        first = compare(folder / "first", arguments.quick)
        second = compare(folder / "second", arguments.quick, "--slower", f"{SLOWED}={PERCENT:g}")
        with neighbour():
            third = compare(folder / "third", True, *NEIGHBOURED)
    rows = [*steps(first), *repetitions(first, second), *found(first, second), *marked(third)]
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows, noise=[first.noise, second.noise, third.noise])


def compare(folder: Path, quick: bool, *options: str) -> Result:
    """One comparison."""
    command = [sys.executable, "-m", "carme_runtime.compare", "--output", str(folder), *options]
    subprocess.run([*command, *["--quick"] * quick], check=True)
    return load(folder / "compare.json")


@contextmanager
def neighbour() -> Iterator[None]:
    """A process for each core that computes all the time."""
    work = [sys.executable, "-c", "while True: pass"]
    several = [subprocess.Popen(work) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in several:
            process.kill()
            process.wait()


def marked(result: Result) -> list[dict[str, Any]]:
    """The share of disturbed turns that were marked, where all were disturbed."""
    turns = result.noise["turns"]
    share = 100 * result.noise["disturbed_turns"] / turns if turns else None
    holds = None if share is None else share >= 95
    return [row("marked_disturbed", "%", share, aim="at least 95 %", holds=holds)]


def steps(result: Result) -> list[dict[str, Any]]:
    """What a step takes of all; who is void is not there."""
    rows = []
    for network in result.networks():
        for ranks in result.ranks():
            times = {one.contestant: one.step.median for one in result.of(network, ranks)}
            rows.append(row(f"step_ms_{network}_{ranks}", "ms", times.pop(OURS, None), peers=times))
    return rows


def repetitions(first: Result, second: Result) -> list[dict[str, Any]]:
    """How far apart the two are, without the one that was slowed."""
    rows = []
    for network in first.networks():
        apart = [
            100 * abs(two.step.median / one.step.median - 1)
            for ranks in first.ranks()
            for one in first.of(network, ranks)
            for two in second.of(network, ranks)
            if one.contestant == two.contestant != SLOWED
        ]
        middle = statistics.median(apart) if apart else None
        holds = None if middle is None else middle < 3
        rows.append(row(f"repeated_{network}", "%", middle, aim="less than 3 %", holds=holds))
    return rows


def found(first: Result, second: Result) -> list[dict[str, Any]]:
    """By how much the slowed one is slower than before, against one that was not."""
    factors = []
    for network in first.networks():
        for ranks in first.ranks():
            pair = []
            for result in (first, second):
                several = {one.contestant: one.rounds for one in result.of(network, ranks)}
                if SLOWED in several and STEADY in several:
                    pair.append(ratio(several[SLOWED], several[STEADY]))
            if len(pair) == 2 and all(pair):
                factors.append(100 * (pair[1].median / pair[0].median - 1))
    middle = statistics.median(factors) if factors else None
    holds = None if middle is None else PERCENT / 2 < middle < PERCENT * 1.5
    return [row("found_slower", "%", middle, aim=f"{PERCENT:g} %, within a half", holds=holds)]


if __name__ == "__main__":
    main()
