"""Finds out what Slurm's word for a wait leaves open: which limit, which nodes, when a booking begins."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from carme.errors import CarmeError
from carme.jobs import Cluster, Job, Reservation
from carme.jobs.explanations import BY_SLURM
from carme.jobs.limits import Limits, limit_detail
from carme.jobs.shortage import reserved_nodes, running_on, shortage
from carme.jobs.times import moment_text
from carme.slurm import Slurm
from carme.translation import message as _

AGAIN_SECONDS = 30.0
USERS_AT_ONCE = 200
SHORT_SECONDS = 5.0  # for which what is missing counts, as long as the same jobs wait
# Where finding it out takes more than this, of one processor, it rests so many times as long: new jobs wait
# without that detail meanwhile.
SHORT_TAKES = 0.1
SHORT_REST = 25.0
SHORT_AT_ONCE = 50  # different requests of waiting jobs at the most, those with the highest priority first
NODES_SHOWN = 4

_LIMITS = ("Assoc", "QOS")
_SHORT = ("Resources", "Priority")
_NODES = ("ReqNodeNotAvail", "Nodes required for job", "Nodes_required_for_job", "NodeDown")


class Waiting:
    """Details on why jobs wait; however many there are, one question of each kind in 30 seconds.

    Args:
        slurm: The cluster.
    """

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._limits: list[Limits] = []
        self._users: set[str] = set()
        self._reservations: list[Reservation] = []
        self._booked: set[str] = set()
        #: How far the data of jobs is, by job.
        self.data: dict[int, str] = {}
        self._short: dict[int, str] = {}
        self._search: asyncio.Task[tuple[dict[int, str], float]] | None = None
        self._short_of: set[int] = set()
        self._short_due = self._short_rest = -SHORT_SECONDS
        self._requested = {"limits": -AGAIN_SECONDS, "reservations": -AGAIN_SECONDS}

    async def complete(self, jobs: Iterable[Job], cluster: Cluster | None) -> dict[int, Job]:
        """Those of the jobs, by id, about whose waiting or suspension more is known than the queue says."""
        jobs = list(jobs)
        # Jobs that their owners gave to Slurm themselves wait for the same; where there are tens of thousands
        # of them, they wait without that detail.
        all_of_them = not self._slurm.has_many_jobs
        waiting = [job for job in jobs if (all_of_them or job.key) and job.is_pending]
        limited = {job.user for job in waiting if job.reason.startswith(_LIMITS)}
        booked = {job.reservation for job in waiting if job.reason == "Reservation" and job.reservation}
        try:
            if self._due("limits", bool(limited), not limited <= self._users):
                carme_users = {job.user for job in waiting if job.key}
                first = sorted(limited, key=lambda user: (user not in carme_users, user))
                self._limits = await self._slurm.limits(first[:USERS_AT_ONCE])
                self._users = limited
            saved = any(job.reason in _SHORT or job.reason.startswith(_NODES) for job in waiting)
            if self._due("reservations", bool(booked) or saved, not booked <= self._booked):
                self._reservations = await self._slurm.reservations()
                self._booked = booked
        except CarmeError:
            pass  # the sentence without the detail is still true
        found = {}
        suspending = (
            {partition.name for partition in cluster.partitions if partition.suspends} if cluster else set()
        )
        for job in jobs if suspending else ():
            if job.is_suspended and job.partition in suspending:
                found[job.id] = job.model_copy(update={"detail": BY_SLURM})
        short = await self._shortages(waiting, jobs, cluster) if cluster else {}
        for job in waiting:
            if detail := short.get(job.id) or self._detail(job, cluster):
                found[job.id] = job.model_copy(update={"detail": detail})
        return found

    async def _shortages(
        self, waiting: Iterable[Job], jobs: Iterable[Job], cluster: Cluster
    ) -> dict[int, str]:
        short = [job for job in waiting if job.reason in _SHORT]
        ids, now = {job.id for job in short}, time.monotonic()
        changed = ids != self._short_of and now >= self._short_rest
        if self._search is None and (changed or now >= self._short_due):
            self._short_of = ids
            self._search = asyncio.create_task(
                asyncio.to_thread(_timed, short, jobs, cluster, self._reservations)
            )
        if self._search is not None:
            # Large sites have many nodes: there the look does not wait, and a later one has what was found.
            await asyncio.wait({self._search}, timeout=0.0 if self._slurm.has_many_jobs else None)
        if self._search is not None and self._search.done():
            search, self._search = self._search, None
            self._short, took = search.result()
            rest = SHORT_REST * took if took > SHORT_TAKES else 0.0
            self._short_rest = now + rest
            self._short_due = now + max(SHORT_SECONDS, rest)
        # While the search rests, jobs may have come to wait for another reason.
        return {number: text for number, text in self._short.items() if number in ids}

    def _due(self, what: str, wanted: bool, new: bool) -> bool:
        now = time.monotonic()
        if not wanted or now < self._requested[what] + (1.0 if new else AGAIN_SECONDS):
            return False
        self._requested[what] = now
        return True

    def _detail(self, job: Job, cluster: Cluster | None) -> str:
        if job.reason.startswith(_LIMITS):
            return limit_detail(job, self._limits)
        if job.reason == "Dependency":
            return self.data.get(job.id, "")
        if job.reason == "Reservation":
            return next(
                (
                    _(
                        "{name} begins {start}",
                        name=reservation.name,
                        start=moment_text(reservation.start, datetime.now(UTC)),
                    )
                    for reservation in self._reservations
                    if reservation.name == job.reservation
                ),
                "",
            )
        if job.reason.startswith(_NODES) and cluster:
            members = {
                name
                for partition in cluster.partitions
                if partition.name in job.partition.split(",")
                for name in partition.node_names
            }
            unavailable = [node.name for node in cluster.nodes if node.name in members and not node.available]
            away = ", ".join(unavailable[:NODES_SHOWN])
            if len(unavailable) > NODES_SHOWN:
                away = _("{names} and {more} more", names=away, more=len(unavailable) - NODES_SHOWN)
            if saved := reserved_nodes(job, cluster, self._reservations, datetime.now(UTC)):
                return _("{saved} and down or drained: {away}", saved=saved, away=away) if away else saved
            return away
        return ""


def _timed(
    short: Iterable[Job], jobs: Iterable[Job], cluster: Cluster, reservations: Sequence[Reservation]
) -> tuple[dict[int, str], float]:
    """The same, and the seconds of a processor that it took."""
    start = time.thread_time()
    return _shortages(short, jobs, cluster, reservations), time.thread_time() - start


def _shortages(
    short: Iterable[Job], jobs: Iterable[Job], cluster: Cluster, reservations: Sequence[Reservation]
) -> dict[int, str]:
    """What is missing for jobs that wait for nodes, by job."""
    running, now = running_on(jobs), datetime.now(UTC)
    found: dict[int, str] = {}
    known: dict[tuple[object, ...], str] = {}
    for job in sorted(short, key=lambda job: (job.key is None, -(job.priority or 0), job.id)):
        requested = (job.user, job.partition, job.nodes, job.gpus, job.gpu_type, job.cpus, job.memory_mb)
        requested = (*requested, job.minutes_limit, job.reservation)
        if requested not in known:
            if len(known) == SHORT_AT_ONCE:
                continue
            known[requested] = shortage(job, cluster, running, now, reservations)
        found[job.id] = known[requested]
    return found
