"""The one poll of Slurm for everybody: what the queue holds, and what changed when."""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from carme.broker.accounting_lookup import AccountingLookup
from carme.broker.feed import Feed
from carme.broker.overview import JobFigures, Overview
from carme.broker.preemptions import Preemptions
from carme.broker.sessions import SessionBook, same
from carme.broker.vanished import Answer, VanishedJobs
from carme.broker.waiting import Waiting
from carme.errors import CarmeError, SlurmError
from carme.jobs import FORGOTTEN, Cluster, Job, JobState, Licence, Phase, Reservation
from carme.slurm import Slurm, UnixAccount
from carme.slurm.lookups import account_named
from carme.translation import message as _

_log = logging.getLogger("carme.broker")

# Seconds between two polls when no job has changed: at the nodes, and, whatever the pulse says, at the queue.
CLUSTER_EVERY = 30.0
CLUSTER_AT_MOST_EVERY = 5.0  # however often jobs change
QUEUE_EVERY = 60.0
# Reservations and licences are for observers alone, and queried so long after a request of one.
OBSERVED_SECONDS = 120.0

# While no job of ours is active none can end: so many seconds after the last change of any job, looks become
# that many times rarer, until somebody submits one.
CALM_AFTER = 60.0
CALM_TIMES = 4

# On a site with many jobs a look takes a while; so many times as long the broker then has for everything
# else, but not more than so many seconds. On any other site a look is short: what else the broker does while
# it waits for Slurm's programs is no reason to see the end of a session later.
REST_TIMES = 4.0
REST_SECONDS = 2.0

# A job whose processes have ended is over within moments; for so many seconds it is polled more often.
ENDING_SECONDS = 1.5
POLL_SECONDS_ENDING = 0.3

# Slurm saves its state some seconds late. When it is killed, the last moments are lost: jobs that it had just
# taken, and that a job was cancelled.
CANCEL_AGAIN_SECONDS = 3.0  # for which a job may live on although its session is over or is to end

# A session's server may be ready before the snapshot shows that its job runs: others hear of the server once
# it does, or after so many seconds.
CATCH_UP_SECONDS = 3.0


@dataclass(slots=True)
class _Entry:
    job: Job
    changed: int  # number of the change that made it what it is
    poll: int  # number of the last poll that had begun when it came in


class Watch:
    """Polls Slurm and keeps the latest snapshot. While Slurm is away the last one stays.

    A poll takes Slurm's pulse, and looks at the queue only if that has changed: how often it queries the
    controller depends neither on the users nor on their jobs.

    Args:
        seconds: Between two polls.
        feed: Where changes are reported.
        book: The sessions, which see what the watch sees.
    """

    def __init__(self, slurm: Slurm, seconds: float, feed: Feed, book: SessionBook) -> None:
        self._slurm = slurm
        self._seconds = seconds
        self._feed = feed
        self._book = book
        self._entries: dict[int, _Entry] = {}
        self._changes: dict[int, _Entry] = {}  # the same by the number of their change, oldest first
        self._lookup = AccountingLookup(slurm)
        self._vanished = VanishedJobs(slurm)
        self._preemptions = Preemptions(slurm)
        self._waiting = Waiting(slurm)
        self._cluster: Cluster | None = None
        self._polls = 0
        self._found: list[Job] = []
        self._pulse = ""
        self._queue_due = self._cluster_due = self._cluster_seen = self._ending_until = -math.inf
        self._observed_until = self._extras_due = -math.inf
        self._reservations: list[Reservation] | None = None
        self._licences: list[Licence] | None = None
        self._answered: datetime | None = None
        self._changed = time.monotonic()
        self._failure: CarmeError | None = None
        self._rest = 0.0  # seconds until the next look at the earliest, unless somebody wants it at once
        self._seen = False
        self._unwanted: set[int] = set()  # jobs that somebody requested to cancel
        self._living: dict[int, float] = {}  # jobs that ought to have ended, and since when or last cancelled
        self._headless: set[int] = set()  # jobs without their first node that were cancelled
        self._wanted = asyncio.Event()
        self._finished = 0  # number of the last poll that is over
        self._polled = asyncio.Condition()

    def jobs(self) -> list[Job]:
        """All jobs in the snapshot.

        Raises:
            SlurmError: Slurm has not answered since the broker started.
        """
        if not self._seen:
            raise self._failure or _not_ready()
        return [entry.job for entry in self._entries.values()]

    def job(self, job_id: int) -> Job | None:
        """One job of the snapshot."""
        entry = self._entries.get(job_id)
        return entry.job if entry else None

    def task(self, array_id: int, number: int) -> Job | None:
        """A task of an array: itself, or what stands for those that wait."""
        found = [entry.job for entry in self._entries.values() if entry.job.has_task(array_id, number)]
        return next((job for job in found if job.task == number), found[0] if found else None)

    def ended(self) -> list[Job]:
        """Jobs that are over and that Slurm still remembers."""
        return [entry.job for entry in self._entries.values() if entry.job.is_over]

    def cluster(self) -> Cluster:
        """The nodes and partitions; `taken` says how old they are. Raises SlurmError as `jobs` does."""
        if self._cluster is None:
            raise self._failure or _not_ready()
        return self._cluster

    async def poll_nodes(self) -> Cluster:
        """The nodes and partitions as they are now. Raises SlurmError when Slurm does not answer."""
        self._cluster = await self._slurm.cluster()
        self._cluster_seen = time.monotonic()
        self._cluster_due = self._cluster_seen + CLUSTER_EVERY
        return self._cluster

    def overview(self) -> Overview:
        """What is known, for an observer. While Slurm is away it is what was known last."""
        self._observed_until = time.monotonic() + OBSERVED_SECONDS
        return Overview(
            answered=self._answered,
            failure=str(self._failure or "") if self._seen else str(self._failure or _not_ready()),
            jobs=[JobFigures.of(entry.job) for entry in self._entries.values()],
            cluster=self._cluster,
            reservations=self._reservations,
            licences=self._licences,
        )

    def remember(self, jobs: list[Job]) -> None:
        """Jobs that were not over when the broker ended: the first poll says what became of them."""
        for job in jobs:
            self._put(job, self._polls)

    async def add(self, job: Job) -> None:
        """Show a job that was just submitted before the next poll does."""
        old = self._entries.get(job.id)
        if old is None or not same(old.job, job):  # else a poll was faster
            if old is not None:
                self._displace(old.job)
            self._put(job, self._polls)
        self._unwanted.discard(job.id)
        self._book.submitted(job)
        await self._feed.notify()
        await self._book.save()
        self.poll_soon()

    def data_is(self, data: dict[int, str]) -> None:
        """How far the data of waiting jobs is, by job; shown with the next poll."""
        if data != self._waiting.data:
            self._waiting.data = data
            self.poll_soon()

    def unwanted(self, job_id: int) -> None:
        """Somebody cancels this job: should Slurm lose it, it is not to come back."""
        self._unwanted.add(job_id)

    async def abandon(self, key: str) -> None:
        """Cancel the job with this key should it turn up: its submission got no answer."""
        self._book.records.abandon(key)
        await self._book.save()
        self.poll_soon()

    def poll_soon(self) -> None:
        """Poll at once."""
        self._wanted.set()

    async def catch_up(self, job_id: int) -> None:
        """Wait until the snapshot can show that a job runs, which its own server was faster to report.

        Returns at once when the snapshot shows it already, and after some seconds when Slurm does not answer.
        """
        entry = self._entries.get(job_id)
        if entry is None or not entry.job.is_pending:
            return
        wanted = self._polls + 1  # one that is under way may have read the queue already
        self.poll_soon()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_SECONDS), self._polled:
                await self._polled.wait_for(lambda: self._finished >= wanted)

    def after(self, since: int, user: str | None) -> list[Job]:
        """Jobs (of one user) that changed after a change, in that order."""
        # Each client that waits asks after each change, so earlier changes are skipped.
        new = itertools.takewhile(lambda entry: entry.changed > since, reversed(self._changes.values()))
        return [entry.job for entry in new if user is None or entry.job.user == user][::-1]

    def _put(self, job: Job, poll: int) -> None:
        """Keep a job that is another than before, with the number of a new change."""
        self._drop(job.id)
        entry = _Entry(job, self._feed.number(), poll)
        self._entries[job.id] = self._changes[entry.changed] = entry

    def _drop(self, job_id: int) -> None:
        if entry := self._entries.pop(job_id, None):
            del self._changes[entry.changed]

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            self._wanted.clear()
            await self._poll()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wanted.wait()

    async def _poll(self) -> None:
        self._polls += 1
        number = self._polls
        start = time.process_time()
        try:
            await self._poll_jobs(number)
            if self._failure:
                _log.info("Slurm answers again.")
            self._failure = None
            self._answered = datetime.now(UTC)
        except CarmeError as error:
            if self._failure is None:
                _log.warning("%s", error)
            self._failure = error
        except Exception:
            # Whatever one poll trips over, the next one must still come.
            _log.exception("A poll of Slurm failed.")
            self._failure = SlurmError(
                _("What Slurm answered could not be read."),
                _("Tell an administrator; the broker's journal has the details."),
            )
        await self._feed.notify()
        await self._book.save()
        took = time.process_time() - start
        self._rest = min(REST_SECONDS, REST_TIMES * took) if self._slurm.has_many_jobs else 0.0
        async with self._polled:
            self._finished = number
            self._polled.notify_all()

    async def _poll_jobs(self, number: int) -> None:
        taken = datetime.now(UTC)
        found = await self._queue()
        if await self._take(found, number):
            self._cluster_due = min(self._cluster_due, self._cluster_seen + CLUSTER_AT_MOST_EVERY)
        await self._show(taken)
        carme_jobs = [job for job in found if job.key]
        await self._cancel_abandoned(carme_jobs)
        await self._cancel_again(carme_jobs)
        await self._cancel_headless(carme_jobs)
        if time.monotonic() >= self._cluster_due:
            await self.poll_nodes()
            await self._show(taken)
        if self._extras_due <= time.monotonic() < self._observed_until:
            self._extras_due = time.monotonic() + CLUSTER_EVERY
            self._reservations = await self._slurm.reservations()
            self._licences = await self._slurm.licences()

    async def _queue(self) -> list[Job]:
        """The queue as it is; the pulse comes first, so that what it has seen is in the queue for certain."""
        pulse = await self._slurm.pulse()
        if pulse != self._pulse or time.monotonic() >= self._queue_due:
            self._found = self._book.records.queue(await self._slurm.queue(), datetime.now(UTC))
            self._pulse = pulse
            self._queue_due = time.monotonic() + QUEUE_EVERY
        return self._found

    async def _show(self, taken: datetime) -> None:
        self._book.observe(self.jobs(), self._cluster, taken)
        await self._feed.notify()

    async def _cancel_abandoned(self, found: list[Job]) -> None:
        records = self._book.records
        for job in found:
            if not (job.is_active and records.is_abandoned(job)):
                continue
            _log.warning("Job %s is cancelled: its submission had got no answer.", job.id)
            try:
                owner = await account_named(job.user)
                await self._slurm.cancel(str(job.array_id or job.id), owner)
                records.abandon(job.key or "", False)
            except CarmeError as error:  # once more with the next poll
                _log.warning("Job %s is not cancelled: %s", job.id, error)

    async def _cancel_again(self, found: list[Job]) -> None:
        """Cancel what lives on although its session is over or was cancelled: Slurm did not keep that."""
        now = time.monotonic()
        alive = [job for job in found if job.key and (job.is_pending or job.is_running)]
        living = [job for job in alive if self._book.is_unwanted(job)]
        self._living = {job.id: self._living.get(job.id, now) for job in living}
        for job in living:
            if now < self._living[job.id] + CANCEL_AGAIN_SECONDS:
                continue
            self._living[job.id] = now
            _log.warning("Job %s is cancelled again: Slurm has lost its cancellation.", job.id)
            try:
                await self._slurm.cancel(job.slurm_name, await account_named(job.user))
            except CarmeError as error:
                _log.warning("Job %s is not cancelled: %s", job.id, error)

    async def _cancel_headless(self, found: list[Job]) -> None:
        """End jobs that have lost their first node, where their command ran: Slurm leaves them the others."""
        headless = {job.id for job in found if job.key and job.is_running and job.failed_node}
        for job in found:
            if job.id not in headless - self._headless:
                continue
            _log.warning("Job %s is cancelled: its first node, %s, has failed.", job.id, job.failed_node)
            try:
                await self._slurm.cancel(job.slurm_name, await account_named(job.user))
            except CarmeError as error:
                headless.discard(job.id)  # once more with the next poll
                _log.warning("Job %s is not cancelled: %s", job.id, error)
        self._headless = headless

    def _displace(self, job: Job) -> None:
        """Another job has the number of this one."""
        if job.is_active:
            _log.warning("Slurm has lost job %s, and has given its number to another one.", job.id)
            self._vanished.displaced(job)
            self._book.displaced(job)

    def _pause(self) -> float:
        """Seconds until the next poll."""
        now = time.monotonic()
        if now < self._ending_until:
            return max(self._rest, min(self._seconds, POLL_SECONDS_ENDING))
        calm = now >= self._changed + CALM_AFTER and self._failure is None
        if calm and not any(entry.job.key and entry.job.is_active for entry in self._entries.values()):
            return CALM_TIMES * self._seconds
        return max(self._rest, self._seconds)

    async def _take(self, found: list[Job], number: int) -> bool:
        """Put what was found into the snapshot; whether a job is another than before."""
        jobs = {job.id: job for job in found}
        # Tens of thousands of jobs go through here at each poll: calls of properties would be a tenth of it.
        over = [job for job in found if job.state.phase is Phase.OVER]
        unknown = [job.id for job in over if self._exit_code(job) is None]
        statuses = await self._slurm.exit_statuses(unknown) if unknown else {}
        for job in over:
            old = self._entries.get(job.id)
            if status := statuses.get(job.id):
                jobs[job.id] = job.model_copy(
                    update={"exit_code": status.exit_code, "signal": status.signal or None}
                )
            elif old:
                jobs[job.id] = job.model_copy(
                    update={"exit_code": old.job.exit_code, "signal": old.job.signal}
                )
        if self._cluster is not None:
            jobs |= {job.id: jobs[job.id].with_whole_nodes(self._cluster) for job in found if job.whole_nodes}
        jobs |= await self._lookup.complete(jobs.values())
        jobs |= await self._preemptions.complete(jobs.values())
        jobs |= await self._waiting.complete(jobs.values(), self._cluster)
        for job in found:
            old = self._entries.get(job.id)
            if old and old.job is not job and not same(old.job, job):
                self._displace(old.job)
                self._drop(job.id)
        missing = [key for key, entry in self._entries.items() if key not in jobs and entry.poll < number]
        gone = [self._entries[job_id].job for job_id in missing]
        answers = await self._vanished.look_up([job for job in gone if not job.is_over])
        closed = await self._vanished.close_lost(found)
        for job in gone:
            entry = self._entries.get(job.id)
            if entry is None or entry.job is not job:
                continue  # its number was given to a job that was submitted meanwhile
            if job.is_over:
                self._feed.forget(entry.changed)
                self._drop(job.id)
                self._unwanted.discard(job.id)
                continue
            answer = answers.get(job.id)  # none yet: it stays as it was
            reported = job if answer is None else answer.ended or await self._lost(job, answer, closed)
            if reported.id != job.id:
                self._drop(job.id)
            jobs[reported.id] = reported
        changed = False
        for job in jobs.values():
            old = self._entries.get(job.id)
            if old is not None and (old.job is job or old.job == job):
                old.poll = number
                continue
            changed = True
            self._put(job, number)
            if job.key and job.state.phase is Phase.ENDING and (old is None or old.job.state != job.state):
                self._ending_until = time.monotonic() + ENDING_SECONDS
        self._seen = True
        if changed:
            self._changed = time.monotonic()
        return changed

    def _exit_code(self, job: Job) -> int | None:
        known = self.job(job.id)
        return known.exit_code if known and known.is_over else None

    async def _lost(self, job: Job, answer: Answer, closed: bool) -> Job:
        """What becomes of a job that Slurm has lost.

        The job of a session that was lost while it waited is submitted again, and may get another number. The
        queue was read before, so it is not there; and should it have begun all the same, it begins only once
        (`carme.launch.preparation.begin`).

        Args:
            answer: What the accounting says about it.
            closed: Whether its record in the accounting has an end.
        """
        waited = job.state is JobState.PENDING and not answer.has_begun
        wanted = job.id not in self._unwanted and not self._book.is_unwanted(job)
        twins = [each for each in self._found if each.key == job.key]
        if waited and wanted and self._book.is_own(job):
            again = next((twin for twin in twins if twin.user == job.user and twin.is_active), None)
            if again and not self._book.records.is_abandoned(job):
                # It was submitted again by a broker that ended before it had kept the new number.
                _log.warning("Job %s, which Slurm had lost while it waited, is job %s.", job.id, again.id)
                self._book.moved(job, again)
                return again
            if not twins:
                if answer.patient and not closed:
                    return job
                with contextlib.suppress(CarmeError):
                    try:
                        owner = await account_named(job.user)
                    except SlurmError as error:
                        _log.warning("Job %s, which Slurm has lost, stays for now: %s", job.id, error)
                        return job  # once more with the next poll
                    return await self._submit_again(job, owner)
        _log.warning("Slurm has lost job %s.", job.id)
        return job.model_copy(update={"state": JobState.FAILED, "reason": FORGOTTEN})

    async def _submit_again(self, job: Job, owner: UnixAccount) -> Job:
        """The job as it waits again. Raises CarmeError when it does not."""
        self._book.records.again(job.key or "")
        await self._book.save()
        try:
            number = await self._slurm.submit_again(job, owner, self._book.submissions(job) + 1)
        except CarmeError as error:
            if error.code == "slurm-away":
                await self.abandon(job.key or "")  # Slurm may have taken it all the same
            _log.warning("Job %s, which Slurm has lost, is not submitted again: %s", job.id, error)
            raise
        _log.warning("Job %s, which Slurm had lost while it waited, is submitted as job %s.", job.id, number)
        now = datetime.now(UTC).replace(microsecond=0)
        again = job.model_copy(
            update={"id": number, "submitted": now, "reason": "", "planned_start": None, "planned_nodes": ""}
        )
        self._book.records.took(job.key or "", number)
        self._book.moved(job, again)
        await self._book.save()
        self.poll_soon()
        return again


def _not_ready() -> SlurmError:
    return SlurmError(
        _("The broker has just started and has not seen Slurm yet."),
        _("Try again in a moment."),
        code="slurm-away",
    )
