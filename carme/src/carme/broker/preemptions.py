"""Finds out which job took the place of one that Slurm preempted.

Neither the queue nor the accounting names it. What took the place is what waited in another partition or with
another quality of service (Slurm preempts across nothing else), and was the first to start on these nodes
once they were free. Owners are notified of it only if Slurm itself shows it to them.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable

from carme.errors import CarmeError
from carme.jobs import Job, JobState
from carme.jobs.nodes import expand
from carme.slurm import Slurm, UnixAccount
from carme.translation import message as _
from carme.translation import plural
from carme.wording import listing

PATIENCE = 60.0  # seconds; what has not started by then came for another reason
ANSWER_SECONDS = 1.0  # a slow answer must not hold the queue's snapshot up
OWNERS_AT_ONCE = 20
NAMED = 3  # jobs in one sentence


class Preemptions:
    """Which jobs took the places of those that were preempted.

    Args:
        slurm: The cluster.
    """

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._since: dict[int, float] = {}
        self._known: dict[int, str] = {}

    async def complete(self, jobs: Collection[Job]) -> dict[int, Job]:
        """The jobs whose preempting job is known, by id.

        Jobs that are not among `jobs` any more are forgotten.
        """
        preempted = {job.id: job for job in jobs if job.key and job.state is JobState.PREEMPTED}
        now = time.monotonic()
        self._since = {job_id: self._since.get(job_id, now) for job_id in preempted}
        self._known = {job_id: words for job_id, words in self._known.items() if job_id in preempted}
        found: dict[str, dict[int, list[Job]]] = {}
        for job in preempted.values():
            if job.id in self._known or now > self._since[job.id] + PATIENCE:
                continue
            if causes := successors(job, jobs):
                found.setdefault(job.user, {})[job.id] = causes
        for owner, places in list(found.items())[:OWNERS_AT_ONCE]:
            with contextlib.suppress(CarmeError, TimeoutError):  # queried again at the next poll
                jobs_shown, partitions_shown = await self._visible_to(owner, places.values())
                for job_id, causes in places.items():
                    self._known[job_id] = _sentence(preempted[job_id], causes, jobs_shown, partitions_shown)
        return {
            job_id: preempted[job_id].model_copy(update={"preempted_by": words})
            for job_id, words in self._known.items()
        }

    async def _visible_to(self, owner: str, causes: Iterable[list[Job]]) -> tuple[set[int], set[str]]:
        """Those of the jobs, and the partitions, that Slurm shows to a user."""
        ids = {job.id for jobs in causes for job in jobs}
        async with asyncio.timeout(ANSWER_SECONDS):
            account = await asyncio.to_thread(UnixAccount.named, owner)  # may ask a directory server
            return await asyncio.gather(
                self._slurm.visible_jobs(ids, account), self._slurm.visible_partitions(account)
            )


def successors(job: Job, jobs: Iterable[Job]) -> list[Job]:
    """The jobs that were the first to start where a preempted one had run."""
    if job.ended is None:
        return []
    nodes = set(expand(job.node_list))
    later = [
        (later_job.started, later_job)
        for later_job in jobs
        if later_job.started is not None
        and later_job.started >= job.ended
        and later_job.submitted is not None
        and later_job.submitted <= job.ended
        and (later_job.partition, later_job.qos) != (job.partition, job.qos)
        and nodes & set(expand(later_job.node_list))
    ]
    first = min((started for started, _ in later), default=None)
    return [later_job for started, later_job in later if started == first]


def _sentence(job: Job, causes: list[Job], jobs: set[int], partitions: set[str]) -> str:
    """What took a job's place, as far as its owner may see these jobs and partitions, else empty."""
    places = {(cause.partition, cause.qos) for cause in causes}
    partition, qos = next(iter(places))
    if len(places) == 1 and len(causes) <= NAMED and {cause.id for cause in causes} <= jobs:
        return plural(
            "job {numbers} in partition {partition}{with_qos}, which has a higher priority",
            "jobs {numbers} in partition {partition}{with_qos}, which have a higher priority",
            len(causes),
            numbers=listing(str(cause.id) for cause in causes),
            partition=partition,
            with_qos=_(" with quality of service {qos}", qos=qos) if qos and qos != job.qos else "",
        )
    names = {name for name, _ in places}
    if names == {partition} and partition != job.partition and partition in partitions:
        return _("a job in partition {partition}, which has a higher priority", partition=partition)
    return ""
