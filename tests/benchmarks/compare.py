"""`carme compare` with all that this environment has, twice, and whether it finds what it must.

    ./test bench compare --quick
    ./test bench compare --json result.json --keep folder

The rows step_ms_<network>_<ranks> are of the first comparison: `ours` is parallelize; minutes is how long it
took. repeated_<network> is how far the medians of the second one are from those of the first, in the median
over contestants and ranks. In the second one Gloo is made 10 % slower on purpose, and found_slower is by how
many percent it was found to be.

Then two contestants are compared three times, and the second time a neighbour computes on all cores now and
then. marked_disturbed is the share of the turns beside it that were marked. neighbour_moved_<network> is how
far the medians of that comparison are from those of its own turns without the neighbour, at most: both are of
the same minutes. neighbour_apart_<network> is how far they are from the means of the comparisons before and
after, in the median: what the machine itself changes meanwhile is in it.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import print_table, row, tidy_up_when_ended, write_json

from carme_runtime.compare import Result, load
from carme_runtime.compare.figures import ratio
from carme_runtime.compare.results import MEASURED, Turn

CARME, SLOWED, PERCENT = "parallelize", "torch-gloo", 10.0
NEIGHBOURED, ROUNDS = (SLOWED, CARME), ("--rounds", "15")  # with the neighbour: more than a hundred turns
MORE = ("--minutes", "3")  # of rounds of the rows that are uncertain, also with --quick
STEADY = "horovod-face"  # what the slowed one is compared with, before and after
SPELL_SECONDS, BREAK_SECONDS = (1.0, 2.0), (2.0, 5.0)  # of the neighbour, drawn between these
DISTURBED_SHARE = 1 / 3  # of a turn, from which on a neighbour disturbs it: its cores lose a sixth
MOST_MINUTES, FRAMEWORKS = 20, 6

Spell = tuple[float, float]  # when the neighbour began to compute, and when it ended


def main() -> None:
    """Compare, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="small networks, few rounds")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the comparisons there")
    arguments = options.parse_args()
    tidy_up_when_ended()
    with tempfile.TemporaryDirectory() as temporary:
        folder, quick = arguments.keep or Path(temporary), arguments.quick
        began = time.monotonic()
        first = compare(folder / "first", quick, *MORE)
        minutes = (time.monotonic() - began) / 60
        second = compare(folder / "second", quick, *MORE, "--slower", f"{SLOWED}={PERCENT:g}")
        before = compare(folder / "before", True, *NEIGHBOURED, *ROUNDS)
        with neighbour() as spells:
            beside = compare(folder / "beside", True, *NEIGHBOURED, *ROUNDS)
        after = compare(folder / "after", True, *NEIGHBOURED, *ROUNDS)
    rows = [*steps(first), duration(first, minutes), *repetitions(first, second), *found(first, second)]
    rows += [marked(beside, spells), *moved(beside, spells), *apart(before, beside, after)]
    print_table(rows)
    if arguments.json:
        noise = [each.noise for each in (first, second, before, beside, after)]
        write_json(arguments.json, rows, noise=noise)


def compare(folder: Path, quick: bool, *options: str) -> Result:
    """One comparison."""
    command = [sys.executable, "-m", "carme_runtime.compare", "--output", str(folder), *options]
    subprocess.run([*command, *["--quick"] * quick], check=True)
    return load(folder / "compare.json")


@contextmanager
def neighbour() -> Iterator[list[Spell]]:
    """A process for each core that computes now and then; when it did is in the list afterwards."""
    spells: list[Spell] = []
    ended, several = threading.Event(), []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            work = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
            several.append(subprocess.Popen([sys.executable, "-c", work]))
        thread = threading.Thread(target=_work_now_and_then, args=(several, spells, ended))
        thread.start()
        try:
            yield spells
        finally:
            ended.set()
            thread.join()
    finally:
        for process in several:
            process.kill()
            process.wait()


def _work_now_and_then(
    several: Sequence["subprocess.Popen[bytes]"], spells: list[Spell], ended: threading.Event
) -> None:
    generator = random.Random(1)
    began = time.time()
    while not ended.wait(generator.uniform(*SPELL_SECONDS)):
        _send(several, signal.SIGSTOP)
        spells.append((began, time.time()))
        if ended.wait(generator.uniform(*BREAK_SECONDS)):
            return
        began = time.time()
        _send(several, signal.SIGCONT)
    spells.append((began, time.time()))


def _send(several: Sequence["subprocess.Popen[bytes]"], number: signal.Signals) -> None:
    for process in several:
        process.send_signal(number)


def disturbed_share(turn: Turn, spells: Sequence[Spell]) -> float:
    """The share of a turn beside which the neighbour computed."""
    end = turn.began + turn.lasted_s
    beside = sum(max(min(end, last) - max(turn.began, first), 0.0) for first, last in spells)
    return beside / turn.lasted_s if turn.lasted_s else 0.0


def marked(result: Result, spells: Sequence[Spell]) -> dict[str, Any]:
    """The share of the turns beside the neighbour that were marked."""
    turns = [turn for each in result.measured for turn in each.turns]
    disturbed = [turn for turn in turns if disturbed_share(turn, spells) >= DISTURBED_SHARE]
    share = 100 * sum(bool(turn.reasons) for turn in disturbed) / len(disturbed) if disturbed else None
    holds = None if share is None else share >= 95
    counts: dict[str, Any] = {"turns": len(turns), "disturbed_turns": len(disturbed)}
    return row("marked_disturbed", "%", share, aim="at least 95 %", holds=holds, **counts)


def moved(result: Result, spells: Sequence[Spell]) -> list[dict[str, Any]]:
    """How far the reported medians are from those of the turns without the neighbour, at most.

    Rows that the report marks as disturbed are not figures that it vouches for; they are counted.
    """
    rows = []
    for network in result.networks():
        several = [each for each in result.measured if each.network == network]
        vouched = [each for each in several if each.status == MEASURED]
        changes = []
        for each in vouched:
            quiet = [turn.ms for turn in each.turns if not disturbed_share(turn, spells)]
            if quiet:
                changes.append(100 * abs(each.step.median / statistics.median(quiet) - 1))
        most = max(changes, default=None)
        counts: dict[str, Any] = {"disturbed_rows": len(several) - len(vouched)}
        holds = None if most is None else most < 3
        rows.append(row(f"neighbour_moved_{network}", "%", most, aim="less than 3 %", holds=holds, **counts))
    return rows


def apart(before: Result, beside: Result, after: Result) -> list[dict[str, Any]]:
    """How far the medians beside the neighbour are from those without it, before and after."""
    rows = []
    for network in beside.networks():
        changes = []
        for each in beside.measured:
            if each.network != network or each.status != MEASURED:
                continue
            quiet = [
                peer.step.median
                for result in (before, after)
                for peer in result.of(network, each.ranks)
                if peer.contestant == each.contestant
            ]
            if len(quiet) == 2:
                changes.append(100 * abs(each.step.median / statistics.mean(quiet) - 1))
        middle = statistics.median(changes) if changes else None
        holds = None if middle is None else middle < 3
        rows.append(row(f"neighbour_apart_{network}", "%", middle, aim="less than 3 %", holds=holds))
    return rows


def duration(result: Result, minutes: float) -> dict[str, Any]:
    """How long the first comparison took, which is to have six frameworks at least."""
    names = {each.contestant for each in result.measured}
    aim = f"less than {MOST_MINUTES} with {FRAMEWORKS} contestants"
    holds = minutes < MOST_MINUTES if len(names) >= FRAMEWORKS else None
    return row("minutes", "min", minutes, aim=aim, holds=holds, contestants=len(names))


def steps(result: Result) -> list[dict[str, Any]]:
    """What a step takes of all; who is void is not there."""
    rows = []
    for network in result.networks():
        for ranks in result.ranks():
            times = {entry.contestant: entry.step.median for entry in result.of(network, ranks)}
            rows.append(row(f"step_ms_{network}_{ranks}", "ms", times.pop(CARME, None), peers=times))
    return rows


def repetitions(first: Result, second: Result) -> list[dict[str, Any]]:
    """How far apart the two are, without the one that was slowed.

    Rows that a report marks as disturbed or uncertain are not figures that it vouches for; they are counted.
    """
    rows = []
    for network in first.networks():
        pairs = [
            (before, after)
            for ranks in first.ranks()
            for before in first.of(network, ranks)
            for after in second.of(network, ranks)
            if before.contestant == after.contestant != SLOWED
        ]
        vouched = [(before, after) for before, after in pairs if before.status == after.status == MEASURED]
        changes = [100 * abs(after.step.median / before.step.median - 1) for before, after in vouched]
        middle = statistics.median(changes) if changes else None
        # A minority of the rows does not prove that repetitions agree.
        holds = None if middle is None else middle < 3 and 2 * len(vouched) > len(pairs)
        counts: dict[str, Any] = {"marked_rows": len(pairs) - len(vouched)}
        rows.append(row(f"repeated_{network}", "%", middle, aim="less than 3 %", holds=holds, **counts))
    return rows


def found(first: Result, second: Result) -> list[dict[str, Any]]:
    """By how much the slowed one is slower than before, against one that was not; certain rows alone."""
    factors = []
    for network in first.networks():
        for ranks in first.ranks():
            pair = []
            for result in (first, second):
                rows = result.of(network, ranks)
                several = {entry.contestant: entry.rounds for entry in rows if entry.status == MEASURED}
                if SLOWED in several and STEADY in several:
                    pair.append(ratio(several[SLOWED], several[STEADY]))
            if len(pair) == 2 and all(pair):
                factors.append(100 * (pair[1].median / pair[0].median - 1))
    middle = statistics.median(factors) if factors else None
    holds = None if middle is None else PERCENT / 2 < middle < PERCENT * 1.5
    return [row("found_slower", "%", middle, aim=f"{PERCENT:g} %, within a half", holds=holds)]


if __name__ == "__main__":
    main()
