"""Finds out what became of jobs that left Slurm's queue before the broker saw them end.

The accounting knows. It is queried beside the polls of the queue, about all such jobs at once: nobody waits
for a snapshot because Slurm's database is slow, and nothing counts as lost because it is away.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

from carme.broker.records import CLOCKS
from carme.errors import CarmeError
from carme.jobs import Job, JobState
from carme.slurm import Slurm

__all__ = ["Answer", "VanishedJobs"]

_log = logging.getLogger("carme.broker")

ANSWER_SECONDS = 1.0  # for which a poll waits for an answer; a later one takes what comes later
AGAIN_SECONDS = 5.0  # after a question that got no answer
AT_ONCE = 500  # jobs in one question
LOST_SECONDS = 30.0  # since its first answer, for which the accounting gets a chance to give a record an end
SILENT_SECONDS = 3600.0  # after which an accounting that does not answer counts as one without a record
CLOSE_AGAIN_SECONDS = 5.0


class Answer(NamedTuple):
    """What the accounting says about a job.

    Attributes:
        ended: The job as it has ended; None: Slurm has lost it.
        has_begun: Whether a lost job had begun.
        patient: Whether to wait for the end of its record.
    """

    ended: Job | None
    has_begun: bool
    patient: bool


class VanishedJobs:
    """Looks jobs up, and has the records of those that Slurm has lost closed.

    Args:
        slurm: The cluster.
    """

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._question: asyncio.Task[dict[int, Job]] | None = None
        self._requested: list[int] = []
        self._due = -math.inf
        self._since: dict[int, float] = {}  # when a job was missed first
        self._answered: dict[int, float] = {}  # when there was an answer about it first
        self._unclosed: set[int] = set()  # lost jobs whose records in the accounting have no end
        self._closing: asyncio.Task[None] | None = None
        self._closes: set[int] = set()
        self._close_due = -math.inf

    async def look_up(self, jobs: Iterable[Job]) -> dict[int, Answer]:
        """What the accounting has just reported about missing jobs, by number; left out: nothing yet.

        Jobs that are not among `jobs` any more are forgotten.
        """
        missing = {job.id: job for job in jobs}
        now = time.monotonic()
        self._since = {job_id: self._since.get(job_id, now) for job_id in missing}
        self._answered = {job_id: first for job_id, first in self._answered.items() if job_id in missing}
        is_new = self._question is None and bool(missing) and now >= self._due
        if is_new:
            # Those of other origin are for their owners' lists of jobs alone, and may be very many.
            first = sorted(missing.values(), key=lambda job: job.key is None)[:AT_ONCE]
            self._requested = [job.id for job in first]
            self._question = asyncio.create_task(self._slurm.accounted_jobs(self._requested))
        if self._question is None:
            return {}
        await asyncio.wait({self._question}, timeout=ANSWER_SECONDS if is_new else 0.0)
        if not self._question.done():
            return {}
        question, self._question = self._question, None
        found, about = self._result(question)
        return {job_id: self._answer(missing[job_id], found.get(job_id)) for job_id in about & missing.keys()}

    def _result(self, question: asyncio.Task[dict[int, Job]]) -> tuple[dict[int, Job], set[int]]:
        """The records that it found, and the jobs about which that is an answer."""
        try:
            return question.result(), set(self._requested)
        except CarmeError as error:
            if error.code == "no-accounting":
                return {}, set(self._requested)
        except Exception:
            _log.exception("What became of jobs cannot be read from the accounting.")
        now = time.monotonic()
        self._due = now + AGAIN_SECONDS
        silent = now - SILENT_SECONDS
        return {}, {job_id for job_id in self._requested if self._since.get(job_id, now) < silent}

    def _answer(self, job: Job, known: Job | None) -> Answer:
        now = time.monotonic()
        patient = now < self._answered.setdefault(job.id, now) + LOST_SECONDS
        if known is not None and not _is_record_of(known, job):
            known = None  # of another job that once had this number
        if known is not None and known.is_over and not _is_closed(known):
            # The accounting gets a job's comment, which says what it is, only with its regular end.
            what = {"name": job.name, "kind": job.kind, "key": job.key, "image": job.image}
            return Answer(known.model_copy(update=what), True, patient)
        if known is not None and not known.is_over:
            self._unclosed.add(job.id)
        has_begun = known is not None and (known.started is not None or known.is_running)
        return Answer(None, has_begun, patient)

    def displaced(self, job: Job) -> None:
        """Slurm has lost this job, and given its number to another one."""
        self._unclosed.add(job.id)

    async def close_lost(self, queue: Iterable[Job]) -> bool:
        """Give the records of lost jobs in the accounting an end; whether none is left without."""
        if not self._unclosed:
            return True
        is_new = self._closing is None
        if is_new:
            # Slurm closes by number: not while another job has the number of a lost one.
            active = any(job.id in self._unclosed and job.is_active for job in queue)
            if active or time.monotonic() < self._close_due:
                return False
            self._closes = set(self._unclosed)
        closing = self._closing = self._closing or asyncio.create_task(self._slurm.close_lost())
        await asyncio.wait({closing}, timeout=ANSWER_SECONDS if is_new else 0.0)
        if not closing.done():
            return False
        self._closing = None
        self._close_due = time.monotonic() + CLOSE_AGAIN_SECONDS
        try:
            closing.result()
        except CarmeError as error:
            _log.warning("What Slurm lost has no end in the accounting yet: %s", error)
            return False
        _log.info("Jobs that Slurm lost have got an end in the accounting: %s.", sorted(self._closes))
        self._unclosed -= self._closes
        return not self._unclosed


def _is_record_of(known: Job, job: Job) -> bool:
    """Whether a record in the accounting is of this job; its owner may have renamed it since."""
    if known.user != job.user:
        return False
    if known.submitted is None or job.submitted is None or known.submitted == job.submitted:
        return True
    # It was put back into the queue, or the time is the broker's own: Slurm had not shown the job yet.
    return known.name == job.name and known.submitted > job.submitted - CLOCKS


def _is_closed(job: Job) -> bool:
    """Whether a record in the accounting is of a lost job that was given an end.

    Of one that had begun that is its start, and without a comment: a job that ended regularly has one.
    """
    if job.state is not JobState.COMPLETED:
        return False
    return job.started is None or (job.started == job.ended and not job.key)
