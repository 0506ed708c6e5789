"""Times training in less memory than it needs against what else trains there, and against the disk's limit.

    python tests/benchmarks/out_of_core.py --quick
    python tests/benchmarks/out_of_core.py --json result.json

Each contestant is a process in a memory cgroup of its own without swap (needs root), so the kernel is the
judge: who takes more is killed and has no figure. The factor of a row is the state (weights, gradients,
optimizer, saved activations) over the limit. The floor is the longer one of computing, as measured without a
limit, and of what must be moved by Belady's order at the bandwidth that the disk had in that run. It lets
both go on side by side for free. `floor_beside` is what this machine makes of that: the same computing
without a limit, while threads read and write as many bytes beside it, and neither waits for the other. No
order of transfers gets below it. These three take turns.

Peers: PyTorch's save_on_cpu, which moves saved tensors to where they are already when there is no GPU;
FSDP2 with its parameters offloaded to the host, one rank; the kernel's swapping, on a swap file, where the
kernel allows one. `deepspeed` has no figure. `no_figure` in the JSON says why a peer has none: how its
process ended, or why none ran.

Steps that are recorded count neither in times nor in bytes: a run has few of them. The JSON says of ours how
long a step waited for blocks (`waited_ms`), and how long the disk had something to do (`disk_ms`).

It exits with 1 when our own training failed in one of the contests, and says how it ended.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import print_table, row, tidy_up_when_ended, write_json
from swap_file import remove_left_swap_files, swap_file

from memory_cgroups import memory_cgroup

PROGRAM = Path(__file__).parents[1] / "native" / "programs" / "out_of_core.py"
MIB = 1 << 20
LIBRARIES = 330 * MIB  # about what PyTorch takes without tensors
SECONDS = 600
STEPS = 7
CONTESTS = (("sgd", 1 / 0.75), ("sgd", 4), ("adamw", 4), ("adamw", 8))
# Options of the program that trains, by what they are called here.
PEERS = {"in_memory": (), "save_on_cpu": ("--save-on-cpu",), "fsdp_offload": ("--fsdp-offload",)}
NO_DEEPSPEED = (
    "DeepSpeed comes as source, and compiles its offload to a disk where it is used, with the headers of "
    "libaio. Its offload to the host's memory moves nothing where there is no GPU."
)
OF_PARAMETER = {"sgd": 12, "adamw": 16}  # bytes of state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller and fewer models")
    parser.add_argument("--factors", type=float, nargs="+", help="rows to measure, such as 1.33 4")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the contestants that matter most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file, too")
    parser.add_argument("--spill", type=Path, metavar="DIR", help="where (default: the temporary folder)")
    options = parser.parse_args()
    tidy_up_when_ended()
    for left in remove_left_swap_files():
        print(f"A run that was killed had left swap on '{left}'. It is off now.", flush=True)
    limit, width = (384 * MIB, 1024) if options.quick else (768 * MIB, 2048)
    contests = (("sgd", 1 / 0.75), ("adamw", 4)) if options.quick else CONTESTS
    known = sorted({round(factor, 2) for _, factor in contests})
    if unknown := [factor for factor in options.factors or () if factor not in known]:
        parser.error(
            f"there is no row with the factor {unknown[0]:g}; choose from {', '.join(map(str, known))}"
        )
    rows = []
    with tempfile.TemporaryDirectory(dir=options.spill) as folder:
        for optimizer, factor in contests:
            if options.factors and round(factor, 2) not in options.factors:
                continue
            rows += contest(optimizer, factor, limit, width, options.rounds, Path(folder))
    print_table(rows)
    if options.json:
        write_json(options.json, rows)
    failures = [f"{each['name']}: {each['error']}" for each in rows if each["ours"] is None]
    if failures:
        sys.exit("\n".join(failures))


def contest(
    optimizer: str, factor: float, limit: int, width: int, rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """The rows of one model."""
    # With a factor below 2 the libraries count: what is needed is they and the state.
    state = factor * limit if factor >= 2 else factor * limit - LIBRARIES
    state = max(state, 0)
    layers = max(round(state / (OF_PARAMETER[optimizer] * width * width)), 1)
    name = f"mlp_{optimizer}_{factor:.3g}x"
    arguments = [optimizer, width, layers, STEPS]
    turns: list[Turn] = []
    for _ in range(rounds):
        free, error = run(arguments)
        if free is None:
            raise SystemExit(f"{name} fails without a limit, too: {error}")
        carme, error = run([*arguments, limit, folder], limit)
        if carme is None:
            peers, why = other_peers(arguments, limit, state, folder)
            peers["unlimited"] = median(free)
            aim = "trains"
            more = {"error": error, "no_figure": why}
            return [row(f"step_ms_{name}", "ms", None, peers=peers, aim=aim, holds=False, **more)]
        plan = carme[-1]["plan"]
        moved = [f"--beside={folder}", f"--read={plan['read']}", f"--written={plan['written']}"]
        beside, error = run([*moved, *arguments])
        if beside is None:
            raise SystemExit(f"{name} fails beside transfers: {error}")
        seen, error = run([*arguments, "64GiB", folder]) if factor < 2 else (None, "")
        if error:
            raise SystemExit(f"{name} fails with a limit that it does not reach: {error}")
        turns.append(Turn(free, carme, beside, seen))
    return rows_of(name, factor, limit, turns, *other_peers(arguments, limit, state, folder))


@dataclass
class Turn:
    """What programs printed that ran one after the other.

    Attributes:
        free: The one without a limit.
        carme: The one with the limit.
        beside: The one whose transfers wait for nothing.
        seen: The one whose limit holds all of it, so that nothing moves; None where it did not run.
    """

    free: list[dict[str, Any]]
    carme: list[dict[str, Any]]
    beside: list[dict[str, Any]]
    seen: list[dict[str, Any]] | None

    @property
    def plan(self) -> dict[str, Any]:
        return self.carme[-1]["plan"]

    @property
    def floor(self) -> float:
        """Milliseconds that a step takes at least."""
        return max(median(self.free), 1000 * self.plan["transfer_seconds"])

    @property
    def moved(self) -> tuple[int, int, int]:
        """Bytes of a step; by Belady's rule; and by it in the room that is not for early blocks.

        What one step begins to write the next one may end, so this is the mean of those that go by a plan
        from their begin.
        """
        measured = statistics.mean(line["moved"] for line in steady(self.carme))
        return round(measured), self.plan["read"] + self.plan["written"], self.plan["planned"]


def other_peers(
    arguments: list[Any], limit: int, state: float, folder: Path
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Milliseconds of a step by other means, None where they do not train; and why they do not."""
    swap, why = swapping(arguments, limit, state, folder)
    figures: dict[str, float | None] = {"swap": swap, "deepspeed": None}
    reasons = {"swap": why, "deepspeed": NO_DEEPSPEED}
    for key, option in PEERS.items():
        lines, reasons[key] = run([*option, *arguments], limit)
        figures[key] = median(lines) if lines else None
    return figures, {key: reason for key, reason in reasons.items() if figures[key] is None}


def rows_of(
    name: str,
    factor: float,
    limit: int,
    turns: list[Turn],
    peers: dict[str, float | None],
    no_figure: dict[str, str],
) -> list[dict[str, Any]]:
    """The rows of what trained: medians over the turns."""
    of_turns = [median(turn.carme) for turn in turns]
    seconds = statistics.median(of_turns)
    unlimited = statistics.median(median(turn.free) for turn in turns)
    beside = statistics.median(median(turn.beside) for turn in turns)
    floor = statistics.median(turn.floor for turn in turns)
    measured, belady, planned = (
        statistics.median(sums) for sums in zip(*(turn.moved for turn in turns), strict=True)
    )
    same = all(losses(turn.carme) == losses(turn.free) for turn in turns)
    peak = max(turn.carme[-1]["peak"] for turn in turns)
    plan = turns[-1].plan
    rows = [
        row(f"step_ms_{name}", "ms", seconds, peers={"unlimited": unlimited, "floor_beside": beside, **peers},
            floor=floor, aim="at most 1.25x the floor", holds=seconds <= 1.25 * floor,
            predicted_ms=1000 * plan["seconds"], of_turns=of_turns, plan=plan, no_figure=no_figure,
            waited_ms=of_steps(turns, "waited"), disk_ms=of_steps(turns, "disk")),
        row(f"over_floor_{name}", "x", seconds / floor, peers={"floor_beside": seconds / beside}),
        row(f"times_faster_{name}", "x", 1.0, aim="3x swapping, or trains where that is killed",
            peers={key: each and each / seconds for key, each in peers.items()},
            holds=(swap := peers["swap"]) is None or swap >= 3 * seconds),
        row(f"moved_mib_{name}", "MiB", measured / MIB, floor=belady / MIB, aim="at most 1.05x Belady's",
            holds=measured <= 1.05 * belady, peers={"planned": planned / MIB}),
        row(f"same_losses_{name}", "bool", float(same), aim="bit by bit", holds=same),
        row(f"peak_mib_{name}", "MiB", peak / MIB, floor=None, aim="at most the limit", holds=peak <= limit),
    ]  # fmt: skip
    if factor < 2:
        seen = statistics.median(median(turn.seen) for turn in turns if turn.seen)
        ratios = {"floor_beside": beside / unlimited, "seen": seen / unlimited}
        rows.append(
            row(f"over_unlimited_{name}", "x", seconds / unlimited, peers=ratios, floor=floor / unlimited,
                aim="at most 1.10x", holds=seconds <= 1.10 * unlimited)
        )  # fmt: skip
    return rows


def of_steps(turns: list[Turn], key: str) -> float:
    """Milliseconds of a step that the program counted under this key: the median of all turns' steps."""
    return 1000 * statistics.median(line[key] for turn in turns for line in steady(turn.carme))


def losses(lines: list[dict[str, Any]]) -> list[str]:
    """Those of all steps, bit by bit."""
    return [line["loss"] for line in lines[:-1]]


def run(
    arguments: list[Any], limit: int | None = None, *, swaps: bool = False
) -> tuple[list[dict[str, Any]] | None, str]:
    """What the program printed; None and its last words when it failed or was killed."""
    with contextlib.ExitStack() as stack:
        enter = None
        if limit is not None:
            group = stack.enter_context(memory_cgroup())
            group.limit(limit, swaps=swaps)
            enter = group.enter
        try:
            done = subprocess.run(
                [sys.executable, str(PROGRAM), *map(str, arguments)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
                preexec_fn=enter,
            )
        except subprocess.TimeoutExpired:
            return None, f"not done in {SECONDS} s"
    if done.returncode < 0:
        return None, f"ended by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        return None, done.stderr.strip().rpartition("\n")[2]
    return [json.loads(line) for line in done.stdout.splitlines()], ""


def steady(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps after the last one that was recorded, and after the first three."""
    steps = lines[:-1]
    recorded = [place for place, line in enumerate(steps) if not line.get("followed", True)]
    # A step that is recorded at the very end leaves none after it: then all but the first three count.
    return steps[max(3, recorded[-1] + 1 if recorded else 0) :] or steps[3:]


def median(lines: list[dict[str, Any]]) -> float:
    """Milliseconds of a step, without those that are recorded."""
    return 1000 * statistics.median(line["seconds"] for line in steady(lines))


def swapping(arguments: list[Any], limit: int, state: float, folder: Path) -> tuple[float | None, str]:
    """A step's milliseconds by the kernel's swapping, and why there are none."""
    try:
        with swap_file(folder, int(state) + 512 * MIB):
            lines, error = run(arguments, limit, swaps=True)
            return median(lines) if lines else None, error
    except (OSError, subprocess.CalledProcessError) as error:
        message = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return None, f"no swap file can be used: {message}"


if __name__ == "__main__":
    main()
