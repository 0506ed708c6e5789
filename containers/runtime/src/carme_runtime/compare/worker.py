"""What each rank of a contestant runs: `python -m carme_runtime.compare.worker NAME TASK`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carme_runtime.compare import tasks
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.door import Line, come_in
from carme_runtime.compare.machine import busy_seconds, companions, peak_bytes, used_seconds
from carme_runtime.compare.programs import Step, Work
from carme_runtime.compare.resting import Rest
from carme_runtime.compare.stored import MEMORY, Stored
from carme_runtime.errors import CarmeRuntimeError

if TYPE_CHECKING:
    import numpy as np

    from carme_runtime.compare.results import Distance

THREADS, SLOWER = "CARME_COMPARE_THREADS", "CARME_COMPARE_SLOWER"
PRECISION, INPUT = "CARME_COMPARE_PRECISION", "CARME_COMPARE_INPUT"
_HALF_BIT = 2.0**-24  # of a number in float32, by which rounding changes it at most
_PLACE = (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("NODE_RANK", 0))


def main() -> None:
    """Prepare, and make steps as often as the comparison asks for them."""
    name, file = sys.argv[1], Path(sys.argv[2])
    rank, ranks = (int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    threads = int(os.environ[THREADS])
    local_rank, local_size, node = (int(os.environ.get(key, default)) for key, default in _PLACE)
    cores = take_cores(local_rank, local_size, node, threads)
    contestant = CONTESTANTS[name]
    program = importlib.import_module(f"carme_runtime.compare.programs.{contestant.program}")
    is_bf16 = os.environ.get(PRECISION) == "bf16"
    source = os.environ.get(INPUT, MEMORY)
    work = Work(
        tasks.read(file), rank, ranks, threads, contestant.setting, is_bf16, input=source, folder=file.parent
    )
    step, gradients = program.prepare(work)
    line = come_in(name, rank)
    names = tuple(dict.fromkeys((*program.VERSIONS, *contestant.needs)))
    line.send(ready=True, host=os.uname().nodename, cores=sorted(cores), versions=versions(names))
    slower = float(os.environ.get(SLOWER, 0))
    servers = companions() if contestant.has_servers else []
    settle = getattr(program, "settle", None)
    steps = Steps(step, slower, cores, servers, local_size, settle, work.stored)

    def compared(reference: Path) -> dict[str, Any]:
        return compare_gradients(gradients(), reference, getattr(program, "FROM_WEIGHTS", False), work)

    rest = Rest(line.fileno()).until_order if contestant.is_restless else None
    serve(line, steps, lambda seconds: probed(program, work, seconds, local_size), compared, rest)
    # Some libraries wait for the other ranks at their end, or for threads of theirs.
    sys.stdout.flush()
    os._exit(0)


def take_cores(local_rank: int, local_size: int, node: int, threads: int) -> set[int]:
    """As many cores as threads for this rank alone, before libraries count them; none if there are fewer."""
    own = cores_of(sorted(os.sched_getaffinity(0)), local_rank, local_size, node, threads)
    if own:
        os.sched_setaffinity(0, own)
    return own


def cores_of(cores: list[int], local_rank: int, local_size: int, node: int, threads: int) -> set[int]:
    """Those of a rank among a node's cores, which are not those of another; none if there are too few.

    Each node begins where the one before would end: nodes may be containers that share a host's cores.
    """
    parts = len(cores) // threads
    if local_rank >= parts:
        return set()
    # As long as all its ranks have cores, a node's are different ones wherever they begin.
    first = (local_rank + (node * local_size if local_size <= parts else 0)) % parts * threads
    return set(cores[first : first + threads])


def versions(modules: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    found: dict[str, str] = {}
    for name in modules:
        for package in (f"{name}-cpu", name):  # what TensorFlow for processors alone is called
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(package)
    return found


class Steps:
    """The steps of a rank, and how long each took.

    Args:
        step: Of the program.
        slower: By how many percent each step is made longer.
        cores: Of this rank alone.
        servers: Processes whose work is the contestant's own, wherever it is done.
        local_size: Ranks on this node, which share the servers' work equally.
        settle: Waits for what a step has left to be done beside the next one.
        stored: Files that its steps read.
    """

    def __init__(
        self,
        step: Step,
        slower: float,
        cores: set[int],
        servers: Sequence[int] = (),
        local_size: int = 1,
        settle: Callable[[], object] | None = None,
        stored: Sequence[Stored] = (),
    ) -> None:
        self._step, self._slower, self._cores, self._servers = step, slower, cores, servers
        self._local_size, self._settle, self._stored = local_size, settle, stored
        self._number = 0

    def make(self, count: int, meet: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """So many steps, and what the rank's cores did beside them.

        Args:
            count: Of steps.
            meet: Waits until all ranks are as far, before each step that begins.
        """
        losses: list[float] = []
        times: list[float] = []
        parts: dict[str, float] = {}
        for file in self._stored:
            file.before_turn()
        busy, own, began = busy_seconds(self._cores), self._own_seconds(), time.perf_counter()
        for _ in range(count):
            for file in self._stored:
                file.before_step()
            meet()
            last = begin = time.perf_counter()

            def mark(part: str) -> None:
                nonlocal last
                now = time.perf_counter()
                parts[part] = parts.get(part, 0.0) + 1000 * (now - last) / count
                last = now

            losses.append(self._step(self._number % tasks.BATCHES, mark))
            if self._slower:
                end = begin + (time.perf_counter() - begin) * (1 + self._slower / 100)
                while time.perf_counter() < end:
                    pass
            times.append(1000 * (time.perf_counter() - begin))
            self._number += 1
        if self._settle:
            self._settle()  # else it is done while others have their turn
        wall = time.perf_counter() - began
        foreign, now = None, busy_seconds(self._cores)
        if self._cores and busy is not None and now is not None:
            foreign = max(now - busy - (self._own_seconds() - own), 0.0) / (wall * len(self._cores))
        return {"losses": losses, "ms": times, "parts": parts, "foreign": foreign}

    def _own_seconds(self) -> float:
        """Of this rank, and its part of its node's servers': nobody knows on which cores these worked."""
        return time.process_time() + used_seconds(self._servers) / self._local_size


def serve(
    line: Line,
    steps: Steps,
    probe: Callable[[float], dict[str, Any]],
    compared: Callable[[Path], dict[str, Any]],
    rest: Callable[[], object] | None = None,
) -> None:
    """Answer until the comparison has had enough, or is gone; `rest` before each order. Raises Lost."""

    def awaited() -> dict[str, Any]:
        if rest:
            rest()
        return line.receive()

    def meet() -> None:
        line.send(ready=True)
        line.receive()

    peak = None
    while not (order := awaited()).get("end"):
        if "steps" in order:
            line.send(**steps.make(int(order["steps"]), meet if order.get("meets") else lambda: None))
        elif "gradients" in order:
            line.send(gradients=compared(Path(order["gradients"])))
        else:
            peak = peak_bytes()  # what the probe needs on top is not the contestant's
            line.send(peak_bytes=peak)  # now, as the probe may end the rank
            line.send(**probe(float(order["probe"])))
    line.send(peak_bytes=peak_bytes() if peak is None else peak)


def compare_gradients(
    found: Iterable[tuple[str, np.ndarray]], reference: Path, from_weights: bool, work: Work
) -> dict[str, Distance]:
    """How far the first step's gradients are from those that they must be, by the weights' names.

    Args:
        found: The contestant's.
        reference: File of those that they must be.
        from_weights: Whether they were computed from what the step has made of the weights.
        work: Of this rank.
    """
    import numpy as np

    distances: dict[str, Distance] = {}
    with np.load(reference) as expected:
        kinks: dict[str, float] = json.loads(str(expected["kinks"]))
        for name, value in found:
            right, weights = expected[name], work.task.weights[name]
            # The error of rounding each of the new weights, as a gradient.
            rounding = _HALF_BIT * float(np.linalg.norm(weights)) / work.task.network.rate
            distances[name] = {
                "norm": float(np.linalg.norm(value)),
                "expected": float(np.linalg.norm(right)),
                "distance": float(np.linalg.norm(value - right)),
                "rounding": kinks[name] + (rounding if from_weights else 0.0),
            }
    return distances


def probed(program: Any, work: Work, seconds: float, ranks_per_node: int) -> dict[str, Any]:
    """What is needed to predict steps: of one rank its profile, of several what connects them; else `why`."""
    try:
        if work.ranks > 1:
            return {"machine": dataclasses.asdict(program.machine(work, ranks_per_node))}
        return {"profile": dataclasses.asdict(program.profile(work, seconds))}
    except CarmeRuntimeError as error:
        return {"why": str(error)}
    except Exception as error:  # whatever it is: the steps are measured already, and stay so
        return {"why": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
