"""What a waiting job can expect: its place, a range for its start, and how such ranges have held lately.

Slurm's own plan assumes that every running job uses up its time limit, so it is the latest start. Jobs end
earlier than that: the earliest start is the plan scaled by the share of their limits that jobs lately used.
It moves closer as time passes, and it is only a range: jobs that are submitted later with a higher priority
can still push the start back, which is why the record of past ranges is shown beside it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from statistics import median
from typing import NamedTuple

from carme.jobs import Job, JobState
from carme.sessions.models import QueueEstimate

__all__ = [
    "TOLERANCE",
    "Place",
    "Range",
    "Record",
    "estimate_start",
    "expected",
    "held",
    "places",
    "planned",
    "used_share",
]

#: A start counts as foretold if it came this close to the range: the range is shown in minutes.
TOLERANCE = timedelta(minutes=1)

ALMOST_A_MINUTE = timedelta(seconds=59, microseconds=999_999)

#: Without ended jobs to judge by.
DEFAULT_SHARE = 0.5
LEAST_SHARE = 0.02


class Place(NamedTuple):
    """The place in a queue (1 is next) and the number of jobs in it."""

    place: int
    waiting: int


class Range(NamedTuple):
    """When a job is expected to start."""

    earliest: datetime
    latest: datetime


class Record(NamedTuple):
    """Of the last `judged` ranges, `correct` held the true start."""

    correct: int = 0
    judged: int = 0


def places(jobs: Iterable[Job], wanted: Callable[[Job], object] = lambda job: True) -> dict[int, Place]:
    """The place of each job that waits, among those that wait for one of its partitions, by priority.

    Jobs on hold (priority 0) wait for somebody's decision and count only for themselves.

    Args:
        wanted: Whether a job's place is of interest.
    """
    jobs = list(jobs)
    wanted_by_partition: dict[str, list[Job]] = {}
    for job in jobs:
        if wanted(job) and _waits(job):
            wanted_by_partition.setdefault(job.partition, []).append(job)
    groups: dict[str, list[Job]] = {}
    for job in jobs if wanted_by_partition else ():  # often none of tens of thousands is wanted
        if _waits(job):
            groups.setdefault(job.partition, []).append(job)
    found: dict[int, Place] = {}
    for requested, wanted_jobs in wanted_by_partition.items():
        partitions = set(requested.split(","))
        rivals = [group for name, group in groups.items() if partitions & set(name.split(","))]
        queue = sorted(_order(job) for group in rivals for job in group if job.priority != 0)
        for job in wanted_jobs:
            place = bisect_left(queue, _order(job)) if job.priority != 0 else len(queue)
            found[job.id] = Place(place + 1, len(queue) + (job.priority == 0))
    return found


def _waits(job: Job) -> bool:
    return job.is_pending and job.state is not JobState.CONFIGURING


def _order(job: Job) -> tuple[int, int]:
    return -(job.priority or 0), job.id


def used_share(ended: Iterable[Job]) -> float:
    """The median share of their time limits that jobs used which ran and ended by themselves."""
    shares = [
        (job.ended - job.started) / timedelta(minutes=job.minutes_limit)
        for job in ended
        if job.started and job.ended and job.minutes_limit and job.state is not JobState.NODE_FAIL
    ]
    return min(1.0, max(LEAST_SHARE, median(shares))) if shares else DEFAULT_SHARE


def expected(job: Job, share: float, now: datetime) -> Range | None:
    """The range of the job's start; None while Slurm has no plan for it.

    Args:
        job: A job that waits.
        share: The share of their limits that jobs use, see `used_share`.
        now: The time of Slurm's plan.
    """
    return planned(job.planned_start, share, now) if job.planned_start is not None else None


def planned(start: datetime, share: float, now: datetime) -> Range:
    """The range of a start that Slurm has planned; `share` and `now` as for `expected`."""
    latest = max(start, now)
    return Range(now + (latest - now) * share, latest)


def estimate_start(job: Job, place: Place, share: float, record: Record, now: datetime) -> QueueEstimate:
    """All that a user sees of a job that waits; the range is in whole minutes."""
    when = expected(job, share, now)
    return QueueEstimate(
        place=place.place,
        waiting=place.waiting,
        reason=job.explanation,
        earliest=_whole_minute(when.earliest) if when else None,
        latest=_whole_minute(when.latest + ALMOST_A_MINUTE) if when else None,
        correct=record.correct,
        judged=record.judged,
    )


def _whole_minute(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


def held(foretold: Range, started: datetime) -> bool:
    """Whether a job started when it was foretold. Judge a job by the first range that it was given."""
    return foretold.earliest - TOLERANCE <= started <= foretold.latest + TOLERANCE
