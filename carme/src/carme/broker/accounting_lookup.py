"""Asks the accounting what the queue does not say about jobs that have just ended."""

import asyncio
import contextlib
import time
from collections.abc import Iterable

from carme.errors import CarmeError
from carme.jobs import Job, JobState
from carme.slurm import Outcome, Slurm

PATIENCE = 30.0  # seconds after which what is still missing will not come
ANSWER_SECONDS = 1.0  # a slow accounting must not hold the queue's snapshot up
AGAIN_SECONDS = 2.0
AT_ONCE = 500  # jobs in one question

_STATES = {JobState.CANCELLED, JobState.OUT_OF_MEMORY, JobState.NODE_FAIL}


class AccountingLookup:
    """What is known about the ends of jobs: one question for all of them, only while something is missing.

    Args:
        slurm: The cluster.
    """

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._known: dict[int, Outcome] = {}
        self._since: dict[int, float] = {}
        self._requested = 0.0
        self._question: asyncio.Task[dict[int, Outcome]] | None = None

    async def complete(self, jobs: Iterable[Job]) -> dict[int, Job]:
        """Those of the jobs, by id, about whose end more is known now than Slurm's queue says.

        Jobs that are not among `jobs` any more are forgotten.
        """
        ended = {job.id: job for job in jobs if job.key and job.state in _STATES}
        now = time.monotonic()
        fresh = [job_id for job_id in ended if job_id not in self._since]
        self._since = {job_id: self._since.get(job_id, now) for job_id in ended}
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in ended}
        missing = [job for job in ended.values() if self._is_missing(job, now)]
        if missing and (fresh or now >= self._requested + AGAIN_SECONDS):
            await self._ask(missing[:AT_ONCE], now)
        return {
            job_id: ended[job_id].model_copy(
                update={name: value for name, value in known._asdict().items() if value}
            )
            for job_id, known in self._known.items()
        }

    def _is_missing(self, job: Job, now: float) -> bool:
        if now > self._since[job.id] + PATIENCE:
            return False
        known = self._known.get(job.id)
        if known is None:
            return True
        if job.state is JobState.OUT_OF_MEMORY:
            return known.peak_memory_mb is None
        return job.state is JobState.CANCELLED and known.cancelled_by is None

    async def _ask(self, jobs: list[Job], now: float) -> None:
        if self._question is None:
            self._requested = now
            self._question = asyncio.create_task(self._slurm.outcomes(jobs))
        await asyncio.wait({self._question}, timeout=ANSWER_SECONDS)
        if self._question.done():
            with contextlib.suppress(CarmeError):  # no accounting, or away: what is known stays
                self._known |= self._question.result()
            self._question = None
