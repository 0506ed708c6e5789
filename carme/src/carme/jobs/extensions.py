"""Whether a running job may have more time, and how much."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from carme.config import SessionSettings
from carme.errors import InvalidRequest
from carme.jobs.cluster import Cluster, Node, Reservation
from carme.jobs.limits import Limits, longest_minutes
from carme.jobs.nodes import expand
from carme.jobs.status import Job
from carme.jobs.times import minutes_text, moment_text
from carme.translation import message as _
from carme.wording import number

__all__ = ["extended_limit"]


@dataclass(frozen=True)
class _Claim:
    """What somebody has on each of some nodes from `start` on; `end` is None for what lasts."""

    start: datetime
    end: datetime | None
    nodes: frozenset[str]
    cpus: float
    memory_mb: float
    gpus: float
    why: str


def extended_limit(
    job: Job,
    minutes: int,
    *,
    policy: SessionSettings,
    cluster: Cluster,
    jobs: Iterable[Job],
    reservations: Iterable[Reservation],
    limits: Iterable[Limits],
    now: datetime,
) -> int:
    """The job's new time limit in minutes since its start.

    Args:
        job: The job as Slurm knows it now.
        minutes: How much longer it is to run.
        policy: The site's rules for its partition; `maximum_minutes` holds for sessions alone.
        cluster: For the partitions' limits and what the nodes have.
        jobs: All jobs, with Slurm's plan for those that wait.
        reservations: All reservations.
        limits: What the accounting allows its owner.
        now: The time.

    Raises:
        InvalidRequest: Why not, and how much longer it may run.
    """
    ends, limit = _end(job, policy)
    # Later than it started, if it was suspended in between.
    start = ends - timedelta(minutes=limit)
    wanted = ends + timedelta(minutes=minutes)
    bound, why = min(
        [
            *_lengths(job, start, policy, cluster, limits),
            *_bookings(job, reservations),
            *_clashes(job, ends, wanted, cluster, list(jobs), reservations),
        ],
        key=lambda bound: bound[0],
        default=(wanted, ""),
    )
    if bound >= wanted:
        return limit + minutes
    raise _too_long(job, ends, bound, why, now)


def _too_long(job: Job, ends: datetime, bound: datetime, why: str, now: datetime) -> InvalidRequest:
    """The refusal of more time than there is until `bound`."""
    what = _kind(job)
    most = (bound - ends) // timedelta(minutes=1)
    if most < 1:
        return _refused(
            _(
                "The {what} cannot be extended beyond {ends}, because {why}.",
                what=what,
                ends=moment_text(ends, now),
                why=why,
            ),
            _("Save your work before then."),
        )
    until = moment_text(ends + timedelta(minutes=most), now)
    return _refused(
        _(
            "The {what} can be extended by at most {most}, until {until}, because {why}.",
            what=what,
            most=minutes_text(most),
            until=until,
            why=why,
        ),
        _("Ask for at most {minutes}.", minutes=number(most, "minute")),
    )


def _kind(job: Job) -> str:
    return _("session") if job.kind == "session" else _("job")


def _end(job: Job, policy: SessionSettings) -> tuple[datetime, int]:
    """When a job ends, and its limit in minutes. Raises InvalidRequest where nothing can be extended."""
    what = _kind(job)
    if job.is_pending:
        raise _refused(
            _("The {what} has not started, so its time has not begun.", what=what),
            _("Stop it and start it again with more time."),
        )
    if not job.is_running or job.started is None:
        raise _refused(
            _("The {what} is over or about to end.", what=what),
            _("Start it again with the time that it needs."),
        )
    if job.minutes_limit is None:
        raise _refused(_("The {what} has no time limit.", what=what), _("It needs no more time."))
    ends = job.ends
    if ends is None:
        raise _refused(
            _("The {what} is suspended, so its time limit is paused.", what=what),
            _("Extend it when it has been resumed."),
        )
    if not policy.extend:
        raise _refused(
            _(
                "Partition {partition} does not let users extend a {what}.",
                partition=job.partition,
                what=what,
            ),
            _("Start the {what} with the time that it needs, or ask an administrator.", what=what),
        )
    return ends, job.minutes_limit


def _refused(message: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(message, remedy, field="minutes")


def _lengths(
    job: Job, started: datetime, policy: SessionSettings, cluster: Cluster, limits: Iterable[Limits]
) -> Iterable[tuple[datetime, str]]:
    if job.kind == "session":
        most = policy.maximum_minutes
        yield (
            started + timedelta(minutes=most),
            _(
                "a session in partition {partition} lasts at most {most}",
                partition=job.partition,
                most=minutes_text(most),
            ),
        )
    for partition in cluster.partitions:
        if partition.name == job.partition and partition.max_minutes is not None:
            yield (
                started + timedelta(minutes=partition.max_minutes),
                _(
                    "a job in partition {partition} lasts at most {most}",
                    partition=job.partition,
                    most=minutes_text(partition.max_minutes),
                ),
            )
    if longest := longest_minutes(job, limits):
        most, holder = longest
        yield (
            started + timedelta(minutes=most),
            _("a job of {holder} lasts at most {most}", holder=holder, most=minutes_text(most)),
        )


def _bookings(job: Job, reservations: Iterable[Reservation]) -> Iterable[tuple[datetime, str]]:
    for reservation in reservations:
        if reservation.name == job.reservation:
            yield reservation.end, _("its booking {booking} ends then", booking=reservation.name)


def _clashes(
    job: Job,
    ends: datetime,
    wanted: datetime,
    cluster: Cluster,
    jobs: list[Job],
    reservations: Iterable[Reservation],
) -> Iterable[tuple[datetime, str]]:
    """When others first need what the job holds, between its present and its wanted end."""
    job_nodes = frozenset(expand(job.node_list))
    claims = [claim for claim in _claims(job, jobs, reservations, cluster) if claim.nodes & job_nodes]
    nodes = [node for node in cluster.nodes if node.name in job_nodes]
    holding = _Claim(ends, wanted, job_nodes, *_per_node(job), "")
    for claim in claims:
        start = max(claim.start, ends)
        if not claim.why or start >= wanted or (claim.end and claim.end <= start):
            continue
        at_that_time = [
            each for each in claims if each.start <= start and (each.end is None or each.end > start)
        ]
        for node in nodes:
            if node.name in claim.nodes and not _fits(node, [holding, *at_that_time]):
                yield start, claim.why
                break


def _claims(
    job: Job, jobs: list[Job], reservations: Iterable[Reservation], cluster: Cluster
) -> Iterable[_Claim]:
    present = {reservation.name for reservation in reservations}
    for rival in jobs:
        # What runs within a reservation uses what the reservation claims already.
        if rival.id == job.id or rival.reservation in present:
            continue
        each = _per_node(rival)
        limit = timedelta(minutes=rival.minutes_limit) if rival.minutes_limit is not None else None
        if rival.is_running and rival.started:
            yield _Claim(rival.started, rival.ends, frozenset(expand(rival.node_list)), *each, "")
        elif rival.is_pending and rival.planned_start and rival.planned_nodes:
            start, nodes = rival.planned_start, frozenset(expand(rival.planned_nodes))
            why = _("another job waits and is planned to start there then")
            yield _Claim(start, start + limit if limit is not None else None, nodes, *each, why)
    for reservation in reservations:
        if reservation.name == job.reservation:
            continue
        nodes = frozenset(reservation.node_names)
        size = max(1, len(nodes))
        whole = [node for node in cluster.nodes if node.name in nodes]
        # A reservation of all processors is one of whole nodes: their memory and GPUs belong to it.
        has_whole_nodes = reservation.cpus >= sum(node.cpus for node in whole) or not reservation.cpus
        yield _Claim(
            reservation.start,
            reservation.end,
            nodes,
            float("inf") if has_whole_nodes else reservation.cpus / size,
            0,
            reservation.gpus / size,
            _(
                "the booking {booking} follows on {nodes}",
                booking=reservation.name,
                nodes=", ".join(sorted(nodes)),
            ),
        )


def _per_node(job: Job) -> tuple[float, float, float]:
    """Processors, memory and GPUs on each of a job's nodes."""
    nodes = max(1, job.nodes)
    return job.cpus / nodes, job.memory_mb / nodes, job.gpus / nodes


def _fits(node: Node, claims: list[_Claim]) -> bool:
    there = [claim for claim in claims if node.name in claim.nodes]
    return (
        sum(claim.cpus for claim in there) <= node.cpus
        and sum(claim.memory_mb for claim in there) <= node.memory_mb
        and sum(claim.gpus for claim in there) <= sum(node.gpus.values())
    )
