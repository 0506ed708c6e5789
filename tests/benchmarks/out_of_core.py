"""Times training in less memory than it needs against what else trains there, and against the disk's limit.

    python tests/benchmarks/out_of_core.py --quick
    python tests/benchmarks/out_of_core.py --json result.json

Each contestant is a process in a memory cgroup of its own without swap (needs root), so the kernel is the
judge: who takes more is killed and has no figure. The factor of a row is the state (weights, gradients,
optimizer, saved activations) over the limit. The floor is the longer one of computing, as measured without a
limit, and of what must be moved by Belady's order at the bandwidth that the disk had in that run.

Peers: PyTorch's save_on_cpu, which moves saved tensors to where they are already when there is no GPU; the
kernel's swapping, on a swap file, where the kernel allows one. FSDP2's offload moves from a GPU to memory, so
without a GPU there is nothing for it to move. The same holds for DeepSpeed's offload to memory; its offload
to a disk needs the headers of libaio where it is built, and was not measured.

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
from pathlib import Path
from typing import Any

from report import print_table, row, tidy_up_when_ended, write_json
from swap_file import remove_left_swap_files, swap_file

from memory_cgroups import memory_cgroup

PROGRAM = Path(__file__).parents[1] / "native" / "programs" / "out_of_core.py"
MIB = 1 << 20
LIBRARIES = 330 * MIB  # about what PyTorch takes without tensors
SECONDS = 600
CONTESTS = (("sgd", 1 / 0.75), ("sgd", 4), ("adamw", 4), ("adamw", 8))
OF_PARAMETER = {"sgd": 12, "adamw": 16}  # bytes of state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file, too")
    parser.add_argument("--spill", type=Path, metavar="DIR", help="where (default: the temporary folder)")
    options = parser.parse_args()
    tidy_up_when_ended()
    for left in remove_left_swap_files():
        print(f"A run that was killed had left swap on '{left}'. It is off now.", flush=True)
    limit, width = (384 * MIB, 1024) if options.quick else (768 * MIB, 2048)
    steps = 5 if options.quick else 8
    rows = []
    with tempfile.TemporaryDirectory(dir=options.spill) as folder:
        for optimizer, factor in (("sgd", 1 / 0.75), ("adamw", 4)) if options.quick else CONTESTS:
            rows += contest(optimizer, factor, limit, width, steps, Path(folder))
    print_table(rows)
    if options.json:
        write_json(options.json, rows)
    failures = [f"{each['name']}: {each['error']}" for each in rows if each["ours"] is None]
    if failures:
        sys.exit("\n".join(failures))


def contest(
    optimizer: str, factor: float, limit: int, width: int, steps: int, folder: Path
) -> list[dict[str, Any]]:
    """The rows of one model."""
    # With a factor below 2 the libraries count: what is needed is they and the state.
    state = factor * limit if factor >= 2 else factor * limit - LIBRARIES
    state = max(state, 0)
    layers = max(round(state / (OF_PARAMETER[optimizer] * width * width)), 1)
    name = f"mlp_{optimizer}_{factor:.3g}x"
    arguments = [optimizer, width, layers, steps]
    free, no_free = run(arguments)
    if free is None:
        raise SystemExit(f"{name} fails without a limit, too: {no_free}")
    ours, error = run([*arguments, limit, folder], limit)
    peers = {"unlimited": median(free), "in_memory": median(run(arguments, limit)[0])}
    peers["swap"], no_swap = swapping(arguments, limit, state, folder)
    peers["save_on_cpu"] = median(run(["--save-on-cpu", *arguments], limit)[0])
    if ours is None:
        return [row(f"step_ms_{name}", "ms", None, peers=peers, aim="trains", holds=False, error=error)]
    faster = {key: peers[key] for key in ("swap", "in_memory", "save_on_cpu")}
    plan, seconds = ours[-1]["plan"], median(ours)
    assert seconds is not None
    floor = 1000 * max(peers["unlimited"] / 1000 if peers["unlimited"] else 0, plan["transfer_seconds"])
    belady = plan["read"] + plan["written"]
    measured = plan["measured_read"] + plan["measured_written"]
    same = [line["loss"] for line in ours[:-1]] == [line["loss"] for line in free[:-1]]
    aim, bound = ("at most 1.25x the floor", 1.25 * floor) if factor >= 2 else (
        "at most 1.10x unlimited", 1.10 * (peers["unlimited"] or 0)
    )  # fmt: skip
    return [
        row(f"step_ms_{name}", "ms", seconds, peers=peers, floor=floor, aim=aim, holds=seconds <= bound,
            predicted_ms=1000 * plan["seconds"], plan=plan, no_swap=no_swap),
        row(f"times_faster_{name}", "x", 1.0, aim="3x swapping, or trains where that is killed",
            peers={key: each and each / seconds for key, each in faster.items()},
            holds=peers["swap"] is None or peers["swap"] >= 3 * seconds),
        row(f"moved_mib_{name}", "MiB", measured / MIB, floor=belady / MIB, aim="at most 1.05x Belady's",
            holds=measured <= 1.05 * belady),
        row(f"same_losses_{name}", "bool", float(same), aim="bit by bit", holds=same),
        row(f"peak_mib_{name}", "MiB", ours[-1]["peak"] / MIB, floor=None, aim="at most the limit",
            holds=ours[-1]["peak"] <= limit),
    ]  # fmt: skip


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


def median(lines: list[dict[str, Any]] | None) -> float | None:
    """Milliseconds of a step, without those that are recorded: the first two."""
    if lines is None:
        return None
    return 1000 * statistics.median(line["seconds"] for line in lines[2:-1])


def swapping(arguments: list[Any], limit: int, state: float, folder: Path) -> tuple[float | None, str]:
    """A step's milliseconds by the kernel's swapping, and why there are none."""
    try:
        with swap_file(folder, int(state) + 512 * MIB):
            lines, error = run(arguments, limit, swaps=True)
            return median(lines), error
    except (OSError, subprocess.CalledProcessError) as error:
        message = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return None, f"no swap file can be used: {message}"


if __name__ == "__main__":
    main()
