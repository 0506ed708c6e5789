"""The one look at Slurm for everybody: what the queue holds, and what changed when."""

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass

from carme.broker.protocol import EventBatch
from carme.errors import CarmeError, SlurmError
from carme.jobs import FORGOTTEN, Cluster, Job, JobState
from carme.slurm import Slurm, UnixAccount

_log = logging.getLogger("carme.broker")

CLUSTER_EVERY = 5  # polls between two looks at the nodes when no job has changed


@dataclass
class _Entry:
    job: Job
    changed: int  # number of the change that made it what it is
    poll: int  # number of the last poll that had begun when it came in


class Watch:
    """Polls Slurm and keeps the latest picture. While Slurm is away the last picture stays.

    A cursor is the watch's own random name and the number of a change. Changes are numbered through; a job
    carries the number of its latest one, so "changed since" needs no history. `_floor` is the highest
    number that a forgotten job took with it: older cursors get the full picture.
    """

    def __init__(self, slurm: Slurm, seconds: float) -> None:
        self._slurm = slurm
        self._seconds = seconds
        self._epoch = secrets.token_hex(4)
        self._entries: dict[int, _Entry] = {}
        self._cluster: Cluster | None = None
        self._change = 0
        self._floor = 0
        self._polls = 0
        self._cluster_due = 0
        self._failure: CarmeError | None = None
        self._seen = False
        self._abandoned: dict[str, UnixAccount] = {}
        self._wanted = asyncio.Event()
        self._news = asyncio.Condition()

    def jobs(self) -> list[Job]:
        """All jobs in the picture.

        Raises:
            SlurmError: Slurm has not answered since the broker started.
        """
        if not self._seen:
            raise self._failure or _not_yet()
        return [entry.job for entry in self._entries.values()]

    def job(self, job_id: int) -> Job | None:
        """One job of the picture."""
        entry = self._entries.get(job_id)
        return entry.job if entry else None

    def cluster(self) -> Cluster:
        """The nodes and partitions; `taken` says how old they are. Raises SlurmError as `jobs` does."""
        if self._cluster is None:
            raise self._failure or _not_yet()
        return self._cluster

    async def add(self, job: Job) -> None:
        """Show a job that was just submitted before the next poll does."""
        if job.id not in self._entries:
            self._change += 1
            self._entries[job.id] = _Entry(job, self._change, self._polls)
            await self._tell()
        self.hurry()

    def abandon(self, key: str, owner: UnixAccount) -> None:
        """Cancel the job with this key should it turn up: its submission got no answer."""
        self._abandoned[key] = owner
        self.hurry()

    def hurry(self) -> None:
        """Poll at once."""
        self._wanted.set()

    async def events(self, cursor: str | None, wait: float, user: str | None) -> EventBatch:
        """Jobs (of one user) that changed since the cursor; waits up to `wait` seconds for one."""
        self.jobs()  # raises when there is no picture
        since = self._since(cursor)
        if since is not None and wait > 0:
            await self._wait_for_change(since, wait, user)
            since = self._since(cursor)
        return EventBatch(
            jobs=self._after(since or 0, user),
            cursor=f"{self._epoch}-{self._change}",
            complete=since is None,
        )

    async def _wait_for_change(self, since: int, wait: float, user: str | None) -> None:
        def changed() -> bool:
            return self._floor > since or (self._change > since and bool(self._after(since, user)))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait), self._news:
                await self._news.wait_for(changed)

    def _since(self, cursor: str | None) -> int | None:
        epoch, _, number = (cursor or "").partition("-")
        if epoch != self._epoch or not (number.isascii() and number.isdecimal()):
            return None
        return since if self._floor <= (since := int(number)) <= self._change else None

    def _after(self, since: int, user: str | None) -> list[Job]:
        found = [
            entry
            for entry in self._entries.values()
            if entry.changed > since and (user is None or entry.job.user == user)
        ]
        return [entry.job for entry in sorted(found, key=lambda entry: entry.changed)]

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            self._wanted.clear()
            await self._poll()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._wanted.wait()

    async def _poll(self) -> None:
        self._polls += 1
        number = self._polls
        try:
            await self._look(number)
            if self._failure:
                _log.info("Slurm answers again.")
            self._failure = None
        except CarmeError as error:
            if self._failure is None:
                _log.warning("%s", error)
            self._failure = error
        except Exception:
            # Whatever one poll trips over, the next one must still come.
            _log.exception("A look at Slurm failed.")
            self._failure = SlurmError(
                "What Slurm answered could not be read.",
                "Tell an administrator; the broker's journal says more.",
            )
        await self._tell()

    async def _look(self, number: int) -> None:
        found = await self._slurm.queue()
        before = self._change
        await self._take(found, number)
        await self._cancel_abandoned(found)
        if self._change != before or number >= self._cluster_due:
            self._cluster = await self._slurm.cluster()
            self._cluster_due = number + CLUSTER_EVERY

    async def _cancel_abandoned(self, found: list[Job]) -> None:
        for job in found:
            owner = self._abandoned.get(job.key or "")
            if owner and job.user == owner.name and job.is_active:
                _log.warning("Job %s is cancelled: its submission had got no answer.", job.id)
                await self._slurm.cancel(job.id, owner)
                del self._abandoned[job.key or ""]

    async def _take(self, found: list[Job], number: int) -> None:
        jobs = {job.id: job for job in found}
        unknown = [job.id for job in found if job.is_over and self._exit_code(job) is None]
        endings = await self._slurm.endings(unknown) if unknown else {}
        for job in found:
            old = self._entries.get(job.id)
            if ending := endings.get(job.id):
                jobs[job.id] = job.model_copy(
                    update={"exit_code": ending.exit_code, "signal": ending.signal or None}
                )
            elif job.is_over and old:
                jobs[job.id] = job.model_copy(
                    update={"exit_code": old.job.exit_code, "signal": old.job.signal}
                )
        for job_id in [
            key for key, entry in self._entries.items() if key not in jobs and entry.poll < number
        ]:
            job = self._entries[job_id].job
            if job.is_over:
                entry = self._entries.pop(job_id)
                self._floor = max(self._floor, entry.changed)
            else:
                jobs[job_id] = await self._vanished(job)
        for job in jobs.values():
            old = self._entries.get(job.id)
            if old is None or old.job != job:
                self._change += 1
                self._entries[job.id] = _Entry(job, self._change, number)
            else:
                old.poll = number
        self._seen = True

    def _exit_code(self, job: Job) -> int | None:
        known = self.job(job.id)
        return known.exit_code if known and known.is_over else None

    async def _vanished(self, job: Job) -> Job:
        """How a job ended that left the queue between two polls."""
        try:
            ended = await self._slurm.accounted(job.id)
        except CarmeError:
            ended = None
        if ended is not None and ended.is_over:
            return ended
        return job.model_copy(update={"state": JobState.FAILED, "reason": FORGOTTEN})

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


def _not_yet() -> SlurmError:
    return SlurmError(
        "The broker has just started and has not seen Slurm yet.", "Try again in a moment.", code="slurm-away"
    )
