"""What is missing for a job that waits: on which nodes, who has it, and until when. Pure functions.

Owners see their own jobs by number; of others' they see how many there are.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from carme.jobs.cluster import Cluster, Node, Reservation
from carme.jobs.nodes import expand
from carme.jobs.status import Job
from carme.jobs.times import moment_text
from carme.translation import message as _
from carme.translation import plural
from carme.wording import listing, memory, number

__all__ = ["HeldResources", "reserved_nodes", "running_on", "shortage"]

NAMED = 4  # nodes, and jobs, in one sentence
_NEVER = datetime.max.replace(tzinfo=UTC)
_ALWAYS = datetime.min.replace(tzinfo=UTC)

_Amounts = tuple[int, int, int]  # GPUs, processors, MiB


class HeldResources(NamedTuple):
    """What a job, or a reservation, holds of one node, and until when."""

    job_id: int
    user: str
    gpu_type: str | None
    amounts: _Amounts
    ends: datetime
    #: The name of the reservation that it is, or in which the job runs.
    reservation: str = ""
    #: When a reservation begins, if it has not yet.
    begins: datetime | None = None


class _Wait(NamedTuple):
    """What a node lacks, whose jobs are in the way, and when the last of those that must end does."""

    node: str
    lacks: _Amounts
    holders: list[HeldResources]
    until: datetime


def running_on(jobs: Iterable[Job]) -> dict[str, list[HeldResources]]:
    """What jobs hold of each node, what ends first first."""
    found: dict[str, list[HeldResources]] = {}
    for job in jobs:
        if job.is_active and not job.is_pending:
            ends, reservation = job.ends or _NEVER, job.reservation or ""
            held = HeldResources(job.id, job.user, job.gpu_type, _per_node(job), ends, reservation)
            for name in expand(job.node_list):
                found.setdefault(name, []).append(held)
    for there in found.values():
        there.sort(key=lambda held: held.ends)
    return found


def shortage(
    job: Job,
    cluster: Cluster,
    running: Mapping[str, list[HeldResources]],
    now: datetime,
    reservations: Sequence[Reservation] = (),
) -> str:
    """What must become free before a waiting job can start; empty where that is not known.

    It names those nodes that can take the job first, as far as time limits show.

    Args:
        running: What jobs hold, see `running_on`.
        reservations: Those of the cluster, which keep nodes from jobs that do not name them.
    """
    needed, kind = _per_node(job), job.gpu_type
    able = [node for node in cluster.members(job.partition) if _suffices(_size(node, kind), needed)]
    own = next((reservation for reservation in reservations if reservation.name == job.reservation), None)
    if own is not None:
        able = [node for node in able if node.name in own.node_names]
    blocking = _blocking(job, reservations, now)
    waits = []
    for node in able:
        if node.available:
            there = running.get(node.name, ())
            saved = [_reserved(each, node, there, now) for each in blocking if node.name in each.node_names]
            waits.append(_wait(node, kind, needed, there, saved))
    count = max(1, job.nodes)
    if len(waits) < count:
        unavailable = [node.name for node in able if not node.available]
        return _("down or drained: {gone}", gone=_list_names(unavailable)) if unavailable else ""
    first = sorted(waits, key=lambda wait: (wait.until, sum(wait.lacks)))[:count]
    short = [wait for wait in first if any(wait.lacks)]
    if not short:
        return ""
    lacks = [sum(amounts) for amounts in zip(*(wait.lacks for wait in short), strict=True)]
    held = [holder for wait in short for holder in wait.holders]
    holders = {each.job_id: each.user for each in held if each.job_id}
    saved_for = {each.reservation: each.begins for each in held if not each.job_id}
    until = max(wait.until for wait in short)
    what = {"amounts": _amounts(lacks), "nodes": _list_names([wait.node for wait in short])}
    if not held:
        return _("{amounts} must become free on {nodes}", **what)
    why = _join_parts(
        _("in use by {holders}", holders=_describe_holders(job.user, holders)) if holders else "",
        _reservations(saved_for, now),
    )
    if until >= _NEVER:
        return _("{amounts} must become free on {nodes}, {why}", why=why, **what)
    return _(
        "{amounts} must become free on {nodes}, {why} until {until} at the latest",
        why=why,
        until=moment_text(until, now),
        **what,
    )


def _join_parts(first: str, second: str) -> str:
    """Both of two parts of a sentence, or the one that is not empty."""
    return _("{first} and {last}", first=first, last=second) if first and second else first or second


def reserved_nodes(job: Job, cluster: Cluster, reservations: Sequence[Reservation], now: datetime) -> str:
    """Which nodes of a job's partition a reservation keeps from it, the first of several, and until when.

    Empty if none does.
    """
    names = {node.name for node in cluster.members(job.partition)}
    for each in sorted(_blocking(job, reservations, now), key=lambda reservation: reservation.start):
        if nodes := [name for name in each.node_names if name in names]:
            begins = each.start if each.start > now else None
            return _(
                "{kept} until {until}: {nodes}",
                kept=_reservations({each.name: begins}, now),
                until=moment_text(each.end, now),
                nodes=_list_names(nodes),
            )
    return ""


def _blocking(job: Job, reservations: Iterable[Reservation], now: datetime) -> list[Reservation]:
    """The reservations that a job does not run in, and that begin before it would end."""
    ends = now + timedelta(minutes=job.minutes_limit) if job.minutes_limit else _NEVER
    return [
        reservation
        for reservation in reservations
        if reservation.name != job.reservation and reservation.end > now and reservation.start < ends
    ]


def _reserved(
    reservation: Reservation, node: Node, there: Iterable[HeldResources], now: datetime
) -> HeldResources:
    """What a reservation keeps of a node beside what its own jobs use there."""
    whole = node.cpus, node.memory_mb
    gpus = sum(node.gpus.values())
    count = max(1, len(reservation.node_names))
    # One of GPUs keeps these alone; Slurm says the processors, which are then all of the node's or a share.
    some = -(-reservation.gpus // count) if reservation.gpus else gpus
    cpus = min(whole[0], -(-reservation.cpus // count)) if reservation.cpus else whole[0]
    memory = whole[1] if (some, cpus) == (gpus, whole[0]) else 0
    inside = [each.amounts for each in there if each.reservation == reservation.name]
    used = [sum(amounts) for amounts in zip((0, 0, 0), *inside, strict=True)]
    amounts = max(0, some - used[0]), max(0, cpus - used[1]), max(0, memory - used[2])
    begins = reservation.start if reservation.start > now else None
    return HeldResources(0, "", None, amounts, reservation.end, reservation.name, begins)


def _reservations(begins_of: Mapping[str, datetime | None], now: datetime) -> str:
    """For which reservations nodes are kept, as a part of a sentence; empty for none."""
    if len(begins_of) > 1:
        return _("kept for the reservations {names}", names=_list_names(sorted(begins_of)))
    for name, begins in begins_of.items():
        if begins:
            return _(
                "kept for the reservation {name} from {begins} on",
                name=name,
                begins=moment_text(begins, now),
            )
        return _("kept for the reservation {name}", name=name)
    return ""


def _suffices(amounts: _Amounts, needed: _Amounts) -> bool:
    return amounts[0] >= needed[0] and amounts[1] >= needed[1] and amounts[2] >= needed[2]


def _wait(
    node: Node,
    kind: str | None,
    needed: _Amounts,
    there: Iterable[HeldResources],
    reserved: Sequence[HeldResources] = (),
) -> _Wait:
    gpus, cpus, memory_mb = _size(node, kind)
    gpus -= node.gpus_used.get(kind, 0) if kind else sum(node.gpus_used.values())
    free = (gpus, cpus - node.cpus_used, memory_mb - node.memory_used_mb)
    for each in reserved:
        gpus, cpus, memory_mb = each.amounts
        free = (free[0] - gpus, free[1] - cpus, free[2] - memory_mb)
    lacks = tuple(max(0, needs - max(0, has)) for needs, has in zip(needed, free, strict=True))
    holders, until = [], _ALWAYS
    # What jobs hold is in this order already.
    holds = sorted([*there, *reserved], key=lambda held: held.ends) if reserved else there
    for held in holds:
        gpus, cpus, memory_mb = held.amounts
        if kind and held.gpu_type and held.gpu_type != kind:
            gpus = 0
        if not ((lacks[0] and gpus) or (lacks[1] and cpus) or (lacks[2] and memory_mb)):
            continue
        holders.append(held)
        if not _suffices(free, needed):
            free = (free[0] + gpus, free[1] + cpus, free[2] + memory_mb)
            until = held.ends
    return _Wait(
        node.name, (lacks[0], lacks[1], lacks[2]), holders, until if _suffices(free, needed) else _NEVER
    )


def _size(node: Node, kind: str | None) -> _Amounts:
    gpus = node.gpus.get(kind, 0) if kind else sum(node.gpus.values())
    return gpus, node.cpus, node.memory_mb


def _per_node(job: Job) -> _Amounts:
    """What a job has of each node, rounded up."""
    nodes = max(1, job.nodes)
    return -(-job.gpus // nodes), -(-job.cpus // nodes), -(-job.memory_mb // nodes)


def _amounts(lacks: Sequence[int]) -> str:
    gpus, cpus, memory_mb = lacks
    parts = [
        number(gpus, "GPU"),
        number(cpus, "processor"),
        _("{amount} of memory", amount=memory(memory_mb)),
    ]
    return listing(part for part, many in zip(parts, lacks, strict=True) if many)


def _describe_holders(user: str, holders: Mapping[int, str]) -> str:
    own_jobs = [str(job_id) for job_id, owner in sorted(holders.items()) if owner == user]
    foreign_jobs = len(holders) - len(own_jobs)
    own = ""
    if own_jobs:
        own = (
            _("your job {mine}", mine=own_jobs[0])
            if len(own_jobs) == 1
            else _("your jobs {mine}", mine=_list_names(own_jobs))
        )
    return _join_parts(
        own, plural("{count} job of others", "{count} jobs of others", foreign_jobs) if foreign_jobs else ""
    )


def _list_names(names: list[str]) -> str:
    more = len(names) - NAMED
    if more > 0:
        return _("{names} and {more} more", names=", ".join(names[:NAMED]), more=more)
    return listing(names)
