"""What the hub knows about jobs: one long poll of the broker for all sessions."""

import asyncio
import logging
from typing import ClassVar
from weakref import WeakKeyDictionary

from carme.broker import AsyncBrokerClient
from carme.errors import CarmeError, NotFound
from carme.jobs import Job, JobState

#: Seconds that one question to the broker waits for news.
LONG_POLL = 30.0
#: Seconds between two attempts to reach a broker that does not answer, at first and at most.
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0


def has_ended(job: Job) -> bool:
    """Whether nothing of the job runs any more, although its nodes may not be free yet."""
    return job.is_over or job.state is JobState.COMPLETING


class JobWatcher:
    """The latest state of every job, kept current by the broker's events.

    Args:
        broker: The client to ask.
        log: Where to say that the broker went away and came back.
    """

    _shared: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, "JobWatcher"]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, broker: AsyncBrokerClient, log: logging.Logger | logging.LoggerAdapter) -> None:
        self.broker = broker
        self.log = log
        self._jobs: dict[int, Job] = {}
        self._held: dict[int, asyncio.Event] = {}
        self._task = asyncio.create_task(self._watch())

    @classmethod
    def shared(cls, socket: str, log: logging.Logger | logging.LoggerAdapter) -> "JobWatcher":
        """The one watcher of this process for a broker's socket."""
        watchers = cls._shared.setdefault(asyncio.get_running_loop(), {})
        if socket not in watchers:
            watchers[socket] = cls(AsyncBrokerClient(socket), log)
        return watchers[socket]

    def hold(self, job_id: int) -> asyncio.Event:
        """Remember a job even after its end; the event is set whenever its state changes."""
        return self._held.setdefault(job_id, asyncio.Event())

    def release(self, job_id: int) -> None:
        """Stop holding a job."""
        self._held.pop(job_id, None)

    def find(self, job_id: int) -> Job | None:
        """The job's latest state, None if nothing is known about it."""
        return self._jobs.get(job_id)

    async def look_up(self, job_id: int, user: str) -> Job | None:
        """The job's latest state; asks the broker about a job that was in no event.

        Raises:
            NotFound: There never was such a job.
        """
        if (known := self.find(job_id)) is not None:
            return known
        try:
            job = await self.broker.job(job_id, user)
        except NotFound:
            raise
        except CarmeError:
            return None
        # An event may have overtaken the answer.
        return self._jobs.setdefault(job_id, job)

    def place(self, job: Job) -> int:
        """How many jobs of the same partition were waiting earlier, plus one."""
        return 1 + sum(
            other.is_pending and other.partition == job.partition and other.id < job.id
            for other in self._jobs.values()
        )

    async def _watch(self) -> None:
        cursor: str | None = None
        delay = 0.0
        while True:
            try:
                batch = await self.broker.events(cursor, LONG_POLL)
            except CarmeError as error:
                if not delay:
                    self.log.warning("Sessions are not watched for now. %s", error)
                delay = min(max(delay * 2, FIRST_DELAY), LONGEST_DELAY)
                await asyncio.sleep(delay)
                continue
            if delay:
                self.log.info("The broker answers again.")
                delay = 0.0
            cursor = batch.cursor
            if batch.complete:
                # A job that is missing here ended long ago: `look_up` finds it in accounting.
                self._jobs = {}
                for event in self._held.values():
                    event.set()
            for job in batch.jobs:
                if job.is_over and job.id not in self._held:
                    self._jobs.pop(job.id, None)
                    continue
                self._jobs[job.id] = job
                if job.id in self._held:
                    self._held[job.id].set()
