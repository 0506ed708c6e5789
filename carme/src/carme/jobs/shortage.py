"""What is missing for a job that waits: on which nodes, who has it, and until when. Pure functions.

Owners see their own jobs by number; of others' they see how many there are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from carme.jobs.cluster import Cluster, Node
from carme.jobs.nodes import expand
from carme.jobs.status import Job
from carme.jobs.times import moment_text
from carme.wording import listing, number

__all__ = ["running_on", "shortage"]

NAMED = 4  # nodes, and jobs, in one sentence
_NEVER = datetime.max.replace(tzinfo=UTC)

_Amounts = tuple[float, float, float]  # GPUs, processors, MiB


@dataclass(frozen=True)
class _Wait:
    """What a node lacks, whose jobs are in the way, and when the last of those that must end does."""

    node: str
    lacks: _Amounts
    holders: tuple[Job, ...]
    until: datetime


def running_on(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """The jobs that hold something of each node."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        if job.is_active and not job.is_pending:
            for name in expand(job.node_list):
                found.setdefault(name, []).append(job)
    return found


def shortage(job: Job, cluster: Cluster, running: Mapping[str, list[Job]], now: datetime) -> str:
    """What must become free before a waiting job can start; empty where that is not known.

    It is told of those nodes that can take the job first, as far as time limits tell.

    Args:
        running: The jobs by node, see `running_on`.
    """
    needed = _each(job, job.gpus)
    able = [
        node
        for node in cluster.members(job.partition)
        if all(has >= needs for has, needs in zip(_size(node, job.gpu_type), needed, strict=True))
    ]
    waits = [_wait(node, job, needed, running.get(node.name, ())) for node in able if node.available]
    count = max(1, job.nodes)
    if len(waits) < count:
        gone = [node.name for node in able if not node.available]
        return f"down or drained: {_some(gone)}" if gone else ""
    first = sorted(waits, key=lambda wait: (wait.until, sum(wait.lacks)))[:count]
    short = [wait for wait in first if any(wait.lacks)]
    if not short:
        return ""
    lacks = [sum(amounts) for amounts in zip(*(wait.lacks for wait in short), strict=True)]
    holders = {one.id: one for wait in short for one in wait.holders}
    until = max(wait.until for wait in short)
    what = f"{_amounts(lacks)} must become free on {_some([wait.node for wait in short])}"
    if holders:
        what += f", in use by {_holders(job, list(holders.values()))}"
        if until < _NEVER:
            what += f" until {moment_text(until, now)} at the latest"
    return what


def _wait(node: Node, job: Job, needed: _Amounts, there: Iterable[Job]) -> _Wait:
    kind = job.gpu_type
    used = (
        node.gpus_used.get(kind, 0) if kind else sum(node.gpus_used.values()),
        node.cpus_used,
        node.memory_used_mb,
    )
    free = [has - taken for has, taken in zip(_size(node, kind), used, strict=True)]
    lacks = [max(0.0, needs - has) for needs, has in zip(needed, free, strict=True)]
    shares = {one.id: _each(one, _gpus_of(one, node, kind)) for one in there}
    holders = [
        one for one in there if any(lack and held for lack, held in zip(lacks, shares[one.id], strict=True))
    ]
    until = datetime.min.replace(tzinfo=UTC)
    for one in sorted(holders, key=lambda one: one.ends or _NEVER):
        if all(has >= needs for has, needs in zip(free, needed, strict=True)):
            break
        free = [has + held for has, held in zip(free, shares[one.id], strict=True)]
        until = one.ends or _NEVER
    if any(has < needs for has, needs in zip(free, needed, strict=True)):
        until = _NEVER
    return _Wait(node.name, (lacks[0], lacks[1], lacks[2]), tuple(holders), until)


def _size(node: Node, kind: str | None) -> _Amounts:
    gpus = node.gpus.get(kind, 0) if kind else sum(node.gpus.values())
    return gpus, node.cpus, node.memory_mb


def _gpus_of(job: Job, node: Node, kind: str | None) -> int:
    other = kind is not None and job.gpu_type is not None and job.gpu_type != kind
    return 0 if other or not node.gpus else job.gpus


def _each(job: Job, gpus: int) -> _Amounts:
    """What a job has of each node, rounded up."""
    nodes = max(1, job.nodes)
    return -(-gpus // nodes), -(-job.cpus // nodes), -(-job.memory_mb // nodes)


def _amounts(lacks: Sequence[float]) -> str:
    gpus, cpus, memory_mb = map(int, lacks)
    parts = [number(gpus, "GPU"), number(cpus, "processor"), f"{memory_mb} MiB of memory"]
    return listing(part for part, many in zip(parts, (gpus, cpus, memory_mb), strict=True) if many)


def _holders(job: Job, holders: list[Job]) -> str:
    mine = sorted(one.id for one in holders if one.user == job.user)
    others = sum(one.user != job.user for one in holders)
    parts = []
    if mine:
        numbers = [str(one) for one in mine]
        parts.append(f"your job {numbers[0]}" if len(mine) == 1 else f"your jobs {_some(numbers)}")
    if others:
        parts.append(f"{number(others, 'job')} of others")
    return " and ".join(parts)


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return f"{', '.join(names[:NAMED])} and {more} more" if more > 0 else listing(names)
