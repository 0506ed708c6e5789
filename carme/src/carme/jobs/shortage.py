"""What is missing for a job that waits: on which nodes, who has it, and until when. Pure functions.

Owners see their own jobs by number; of others' they see how many there are.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from carme.jobs.cluster import Cluster, Node
from carme.jobs.nodes import expand
from carme.jobs.status import Job
from carme.jobs.times import moment_text
from carme.wording import listing, number

__all__ = ["Held", "running_on", "shortage"]

NAMED = 4  # nodes, and jobs, in one sentence
_NEVER = datetime.max.replace(tzinfo=UTC)
_ALWAYS = datetime.min.replace(tzinfo=UTC)

_Amounts = tuple[int, int, int]  # GPUs, processors, MiB


class Held(NamedTuple):
    """What a job holds of one node, and until when."""

    job_id: int
    user: str
    gpu_type: str | None
    amounts: _Amounts
    ends: datetime


class _Wait(NamedTuple):
    """What a node lacks, whose jobs are in the way, and when the last of those that must end does."""

    node: str
    lacks: _Amounts
    holders: list[Held]
    until: datetime


def running_on(jobs: Iterable[Job]) -> dict[str, list[Held]]:
    """What jobs hold of each node, what ends first first."""
    found: dict[str, list[Held]] = {}
    for job in jobs:
        if job.is_active and not job.is_pending:
            held = Held(job.id, job.user, job.gpu_type, _each(job), job.ends or _NEVER)
            for name in expand(job.node_list):
                found.setdefault(name, []).append(held)
    for there in found.values():
        there.sort(key=lambda held: held.ends)
    return found


def shortage(job: Job, cluster: Cluster, running: Mapping[str, list[Held]], now: datetime) -> str:
    """What must become free before a waiting job can start; empty where that is not known.

    It is told of those nodes that can take the job first, as far as time limits tell.

    Args:
        running: What jobs hold, see `running_on`.
    """
    needed, kind = _each(job), job.gpu_type
    able = [node for node in cluster.members(job.partition) if _has(_size(node, kind), needed)]
    waits = [_wait(node, kind, needed, running.get(node.name, ())) for node in able if node.available]
    count = max(1, job.nodes)
    if len(waits) < count:
        gone = [node.name for node in able if not node.available]
        return f"down or drained: {_some(gone)}" if gone else ""
    first = sorted(waits, key=lambda wait: (wait.until, sum(wait.lacks)))[:count]
    short = [wait for wait in first if any(wait.lacks)]
    if not short:
        return ""
    lacks = [sum(amounts) for amounts in zip(*(wait.lacks for wait in short), strict=True)]
    holders = {one.job_id: one.user for wait in short for one in wait.holders}
    until = max(wait.until for wait in short)
    what = f"{_amounts(lacks)} must become free on {_some([wait.node for wait in short])}"
    if holders:
        what += f", in use by {_holders(job.user, holders)}"
        if until < _NEVER:
            what += f" until {moment_text(until, now)} at the latest"
    return what


def _has(amounts: _Amounts, needed: _Amounts) -> bool:
    return amounts[0] >= needed[0] and amounts[1] >= needed[1] and amounts[2] >= needed[2]


def _wait(node: Node, kind: str | None, needed: _Amounts, there: Iterable[Held]) -> _Wait:
    gpus, cpus, memory_mb = _size(node, kind)
    gpus -= node.gpus_used.get(kind, 0) if kind else sum(node.gpus_used.values())
    free = (gpus, cpus - node.cpus_used, memory_mb - node.memory_used_mb)
    lacks = tuple(max(0, needs - has) for needs, has in zip(needed, free, strict=True))
    holders, until = [], _ALWAYS
    for held in there:
        gpus, cpus, memory_mb = held.amounts
        if kind and held.gpu_type and held.gpu_type != kind:
            gpus = 0
        if not ((lacks[0] and gpus) or (lacks[1] and cpus) or (lacks[2] and memory_mb)):
            continue
        holders.append(held)
        if not _has(free, needed):
            free = (free[0] + gpus, free[1] + cpus, free[2] + memory_mb)
            until = held.ends
    return _Wait(node.name, (lacks[0], lacks[1], lacks[2]), holders, until if _has(free, needed) else _NEVER)


def _size(node: Node, kind: str | None) -> _Amounts:
    gpus = node.gpus.get(kind, 0) if kind else sum(node.gpus.values())
    return gpus, node.cpus, node.memory_mb


def _each(job: Job) -> _Amounts:
    """What a job has of each node, rounded up."""
    nodes = max(1, job.nodes)
    return -(-job.gpus // nodes), -(-job.cpus // nodes), -(-job.memory_mb // nodes)


def _amounts(lacks: Sequence[int]) -> str:
    gpus, cpus, memory_mb = lacks
    parts = [number(gpus, "GPU"), number(cpus, "processor"), f"{memory_mb} MiB of memory"]
    return listing(part for part, many in zip(parts, lacks, strict=True) if many)


def _holders(user: str, holders: Mapping[int, str]) -> str:
    mine = [str(job_id) for job_id, owner in sorted(holders.items()) if owner == user]
    others = len(holders) - len(mine)
    parts = []
    if mine:
        parts.append(f"your job {mine[0]}" if len(mine) == 1 else f"your jobs {_some(mine)}")
    if others:
        parts.append(f"{number(others, 'job')} of others")
    return " and ".join(parts)


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return f"{', '.join(names[:NAMED])} and {more} more" if more > 0 else listing(names)
