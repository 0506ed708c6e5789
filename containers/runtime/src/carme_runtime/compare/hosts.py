"""How many cores each rank of a comparison has, counted where the ranks run.

`python -m carme_runtime.compare.hosts` is what each rank runs to report it.
"""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from carme_runtime.compare.errors import CompareError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MARK = "CORES "
_SECONDS = 300.0


def main() -> None:
    """Print this rank's kernel and cores; one write, so that the lines of two ranks do not mix."""
    try:
        kernel = _BOOT.read_text().strip()
    except OSError:
        kernel = os.uname().nodename
    sys.stdout.write(f"{_MARK}{json.dumps([kernel, sorted(os.sched_getaffinity(0))])}\n")


def threads_of(launch: list[str], ranks: int) -> int:
    """The threads that each rank may have, so that no two share a core.

    Nodes can be containers of one host, which then count the same cores: ranks on one kernel divide its
    cores, however many nodes it has. Thread pools that share cores made steps of JAX eight times as long.

    Args:
        launch: What starts carme-run.
        ranks: How many ranks there are.

    Raises:
        CompareError: The ranks cannot be started.
    """
    line = [*launch, "--no-gpu", "-n", str(ranks), "-m", "carme_runtime.compare.hosts"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise CompareError(
            f"{ranks} ranks did not start within {_SECONDS:.0f} s.", "Use fewer ranks."
        ) from None
    found = re.findall(rf"{_MARK}(\[.*\])", done.stdout)
    if len(found) != ranks:
        lines = done.stderr.strip().splitlines() or ["no reason is known"]
        raise CompareError(f"{ranks} ranks cannot be started: {lines[-1].removeprefix('carme-run: ')}")
    return share((kernel, cores) for kernel, cores in map(json.loads, found))


def share(ranks: Iterable[tuple[str, list[int]]]) -> int:
    """The threads of each rank, by the kernel and the cores of every rank."""
    cores: dict[str, set[int]] = defaultdict(set)
    counted: dict[str, int] = defaultdict(int)
    for kernel, own in ranks:
        cores[kernel].update(own)
        counted[kernel] += 1
    return max(1, min(len(cores[kernel]) // counted[kernel] for kernel in cores))


if __name__ == "__main__":
    main()
