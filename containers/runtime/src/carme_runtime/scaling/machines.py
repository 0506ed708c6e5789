"""The machine of a run that has begun: its links, and what reducing takes from computing."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime import fusion
from carme_runtime.graph import Links
from carme_runtime.scaling.network import MIB, NEAR, Machine
from carme_runtime.torch.pipeline_run import Run

_LEAST_ROUNDS, _ROUNDS, _SIDE = 3, 7, 160
_MEBIBYTES, _BESIDE_MEBIBYTES = 4, 32
_FEWEST_PASSES = 3  # without reducing, however long they take: a single one may take any time
_SECONDS, _PASSES_SECONDS, _LONGEST_SECONDS, _ALL_SECONDS = 0.05, 0.25, 5.0, 6.0


def machine_of(run: Run, ranks_per_node: int, computing: Callable[[], object] | None = None) -> Machine:
    """Measure the ranks' machine; all ranks call this together, and what rank 0 gets counts.

    Args:
        run: Of several ranks, which compute on processors.
        ranks_per_node: How many of them each node has.
        computing: What a rank computes while gradients travel between nodes, such as the passes of a model
            with its share of the batch: reducing takes its core and its caches. None: small matrices.
    """
    links = run.links(torch.device("cpu"))
    if ranks_per_node >= run.size:
        return Machine(links, ranks_per_node, links, host_ms_per_mib=host_ms_per_mib())
    host = host_ms_per_mib(computing, _BESIDE_MEBIBYTES, fusion.threshold(fusion.SMALL_BUCKET_BYTES))
    near = Links(links.within, "copies in memory") if links.within else NEAR
    return Machine(
        links, ranks_per_node, near, host_ms_per_mib=host, gathering_ms_per_mib=gathering_ms_per_mib()
    )


def host_ms_per_mib(
    computing: Callable[[], object] | None = None, mebibytes: int = _MEBIBYTES, bucket: int = 0
) -> float:
    """Milliseconds by which reducing a MiB makes computing longer; all ranks call this together.

    Args:
        computing: What is computed meanwhile. None: small matrices.
        mebibytes: How much is reduced in each round.
        bucket: Bytes that are reduced at a time. 0: all at once.
    """
    matrix, buffer = torch.randn(_SIDE, _SIDE), torch.randn(mebibytes * MIB // 4)
    compute = computing or (lambda: matrix.matmul(matrix))
    parts = buffer.split(max(bucket // 4, 1)) if bucket else (buffer,)
    compute()
    found: list[float] = []
    began, over = time.monotonic(), torch.zeros(1)
    while len(found) < _ROUNDS and not (len(found) >= _LEAST_ROUNDS and over.item()):
        dist.barrier()  # all compute at the same time, with and without
        seconds = _PASSES_SECONDS if computing else _SECONDS
        count, took = _computing(compute, seconds, lambda: False, _FEWEST_PASSES)
        each = took / count
        dist.barrier()
        works: list[Any] = [dist.all_reduce(part, async_op=True) for part in parts]
        last = works[-1]
        count, took = _computing(compute, _LONGEST_SECONDS, last.is_completed)
        for work in works:
            work.wait()
        found.append(max(took - count * each, 0.0) * 1000 / mebibytes)
        over.fill_(time.monotonic() - began > _ALL_SECONDS)
        dist.all_reduce(over)  # so that all make as many rounds
    return statistics.median(found)


def gathering_ms_per_mib() -> float:
    """Milliseconds that bringing a MiB of gradients into its bucket takes of a core that computes.

    All ranks call this together: those of one host share the rate of its memory. What is reduced above lies
    in a buffer already.
    """
    gradient = torch.randn(_BESIDE_MEBIBYTES * MIB // 4)
    bucket = torch.zeros_like(gradient)
    found: list[float] = []
    dist.barrier()
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        bucket.copy_(gradient)
        found.append((time.perf_counter() - began) * 1000 / _BESIDE_MEBIBYTES)
    return statistics.median(found)


def _computing(
    compute: Callable[[], object], seconds: float, over: Callable[[], bool], fewest: int = 0
) -> tuple[int, float]:
    """How often the same is computed until it is over, and in how many seconds."""
    began, count = time.perf_counter(), 0
    while ((took := time.perf_counter() - began) < seconds and not over()) or count < fewest:
        compute()
        count += 1
    return count, took
