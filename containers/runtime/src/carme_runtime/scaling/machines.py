"""The machine of a run that has begun: its links, and what reducing takes from computing."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from carme_runtime.graph import Links
from carme_runtime.scaling.network import MIB, NEAR, Machine
from carme_runtime.torch.pipeline_run import Run

_ROUNDS, _SIDE = 5, 160
_MEBIBYTES = 4
_SECONDS, _LONGEST_SECONDS = 0.05, 5.0


def machine_of(run: Run, ranks_per_node: int) -> Machine:
    """Measure the ranks' machine; all ranks call this together, and what rank 0 gets counts.

    Args:
        run: Of several ranks, which compute on processors.
        ranks_per_node: How many of them each node has.
    """
    links, host = run.links(torch.device("cpu")), host_ms_per_mib()
    if ranks_per_node >= run.size:
        return Machine(links, ranks_per_node, links, host_ms_per_mib=host)
    near = Links(links.within, "copies in memory") if links.within else NEAR
    return Machine(links, ranks_per_node, near, host_ms_per_mib=host)


def host_ms_per_mib() -> float:
    """Milliseconds by which reducing a MiB makes computing longer; all ranks call this together."""
    matrix, buffer = torch.randn(_SIDE, _SIDE), torch.randn(_MEBIBYTES * MIB // 4)
    found = []
    for _ in range(_ROUNDS):
        count, took = _computing(matrix, _SECONDS, lambda: False)
        each = took / count
        dist.barrier()
        work = dist.all_reduce(buffer, async_op=True)
        assert work
        count, took = _computing(matrix, _LONGEST_SECONDS, work.is_completed)
        work.wait()
        found.append(max(took - count * each, 0.0) * 1000 / _MEBIBYTES)
    return statistics.median(found)


def _computing(matrix: torch.Tensor, seconds: float, over: Callable[[], bool]) -> tuple[int, float]:
    """How often the same is computed until it is over, and in how many seconds."""
    began, count = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds and not over():
        matrix.matmul(matrix)
        count += 1
    return count, took
