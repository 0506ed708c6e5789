"""What the hub knows about jobs and sessions: one long poll of the broker for all of them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

from carme.broker import AsyncBrokerClient
from carme.errors import BrokerUnavailable, CarmeError, NotFound, SlurmError
from carme.jobs import Job, JobState
from carme.sessions import Session, SessionNote
from carme.translation import message as _
from carme_spawner.notes import Notes

#: Seconds that one question to the broker waits for a change.
LONG_POLL = 30.0
#: Seconds between two attempts to reach a broker that does not answer, at first and at most.
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0
#: Seconds that a new hub waits for the broker's first answer before it asks for single jobs.
FIRST_ANSWER = 2.0

T = TypeVar("T", Job, Session)


def has_ended(job: Job) -> bool:
    """Whether the job is over or on its way there: what has not begun in it will not begin any more.

    Its programs may still run, for as long as Slurm gives them to end (`KillWait`).
    """
    return job.is_over or job.state is JobState.COMPLETING


def job_name(session: str) -> str:
    """The name of a session's job."""
    return f"session-{session}"


def serves(job: Job, session: str) -> bool:
    """Whether a job is a session's, as the broker knows it: anybody may give other jobs any name."""
    return job.kind == "session" and job.name == job_name(session)


class JobWatcher:
    """The latest state of every job and session, kept current by the broker's events.

    Args:
        broker: The client to ask.
        log: Where to say that the broker went away and came back.
    """

    _shared: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, "JobWatcher"]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, broker: AsyncBrokerClient, log: logging.Logger | logging.LoggerAdapter) -> None:
        self.broker = broker
        self.notes = Notes(broker, log)
        self.log = log
        self._jobs: dict[int, Job] = {}
        self._sessions: dict[int, Session] = {}
        self._held: dict[int, asyncio.Event] = {}
        self._listeners: dict[int, Callable[[], None]] = {}
        self._answered = asyncio.Event()
        self._task = asyncio.create_task(self._watch())

    @classmethod
    def shared(cls, socket: str, log: logging.Logger | logging.LoggerAdapter) -> "JobWatcher":
        """The one watcher of this process for a broker's socket."""
        watchers = cls._shared.setdefault(asyncio.get_running_loop(), {})
        if socket not in watchers:
            watchers[socket] = cls(AsyncBrokerClient(socket), log)
        return watchers[socket]

    def hold(self, job_id: int) -> asyncio.Event:
        """Remember a job even after its end; its next change sets the event."""
        return self._held.setdefault(job_id, asyncio.Event())

    def listen(self, job_id: int, listener: Callable[[], None]) -> None:
        """Call `listener` at every change of a job; a job has at most one."""
        self.hold(job_id)
        self._listeners[job_id] = listener

    def ignore(self, job_id: int) -> None:
        """Call nobody any more."""
        self._listeners.pop(job_id, None)

    def release(self, job_id: int) -> None:
        """Stop holding a job, and notify nobody about it any more."""
        self._held.pop(job_id, None)
        self.ignore(job_id)
        for known in (self._jobs, self._sessions):
            entry = known.get(job_id)
            if entry is not None and entry.is_over:
                del known[job_id]

    def changed(self, job_id: int) -> None:
        """Notify those who wait for changes of a job."""
        if event := self._held.get(job_id):
            self._held[job_id] = asyncio.Event()
            event.set()
        if listener := self._listeners.get(job_id):
            listener()

    def find(self, job_id: int) -> Job | None:
        """The job's latest state, None if nothing is known about it."""
        return self._jobs.get(job_id)

    def successor(self, job_id: int, user: str, session: str) -> int:
        """The number that the broker got for the job of a session when Slurm had lost it."""
        reported = [each for each in self._sessions.values() if (each.owner, each.name) == (user, session)]
        return next((each.job_id for each in reported if job_id in each.lost_jobs), job_id)

    def session(self, job_id: int) -> Session | None:
        """The broker's last report of this job's session; None before the first one."""
        return self._sessions.get(job_id)

    async def look_up(self, job_id: int, user: str, session: str) -> Job | None:
        """The state of a session's job; asks the broker about a job that was in no event.

        Raises:
            NotFound: There never was such a job, or it has another session's number now.
        """
        job = await self._job(job_id, user)
        if job is not None and not serves(job, session):
            raise NotFound(
                _(
                    "Job {job_id} is not the one of session {session} any more.",
                    job_id=job_id,
                    session=session,
                ),
                _("Start the session again."),
            )
        return job

    async def _job(self, job_id: int, user: str) -> Job | None:
        if not self._answered.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_ANSWER):
                    await self._answered.wait()
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

    async def end(self, job_id: int, user: str, session: str, note: SessionNote) -> None:
        """Cancel a session's job, as soon as broker and Slurm can be reached; the note goes ahead."""
        await self.notes.send(job_id, user, session, note)
        while True:
            try:
                await self.broker.cancel(job_id, user, session)
                return
            except NotFound:
                return
            except CarmeError as error:
                if not isinstance(error, BrokerUnavailable | SlurmError) and error.code != "busy":
                    self.log.error("Job %s of %s cannot be ended: %s", job_id, user, error)
                    return
                self.log.warning("Job %s of %s is not ended yet: %s", job_id, user, error)
                await asyncio.sleep(1)

    def sessions(self) -> list[Session]:
        """All sessions that the broker has reported."""
        return list(self._sessions.values())

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
            changed = {job.id for job in batch.jobs} | {session.job_id for session in batch.sessions}
            if batch.complete:
                # A job that is missing here ended long ago: `look_up` finds it in accounting.
                self._jobs, self._sessions = {}, {}
                changed |= self._held.keys()
            self._store(self._jobs, {job.id: job for job in batch.jobs})
            self._store(self._sessions, {session.job_id: session for session in batch.sessions})
            self._answered.set()
            for job_id in changed:
                try:
                    self.changed(job_id)
                except Exception:
                    # An error with one session must not keep the others from being notified.
                    self.log.exception("The changes of job %s could not be applied.", job_id)

    def _store(self, known: dict[int, T], changed: dict[int, T]) -> None:
        """Store what has changed; what is over only if somebody holds it."""
        for job_id, entry in changed.items():
            if entry.is_over and job_id not in self._held:
                known.pop(job_id, None)
            else:
                known[job_id] = entry
