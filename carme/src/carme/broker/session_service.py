"""Shows sessions, and records what the hub reports about them."""

import asyncio
import logging

from carme.broker import protocol
from carme.broker.context import Context
from carme.broker.dispatch import handles
from carme.broker.files import JobFiles
from carme.broker.peers import Peer, acting_for
from carme.errors import CarmeError
from carme.jobs import Job
from carme.sessions import ServerStatus, Session

_log = logging.getLogger("carme.broker")


class SessionService:
    """Answers about sessions, and reads the log tails of those that failed."""

    def __init__(self, context: Context, files: JobFiles) -> None:
        self._context = context
        self._files = files
        self._reading: set[int] = set()  # the jobs whose logs are being read

    @handles(protocol.GetSessions)
    async def sessions(self, peer: Peer, request: protocol.GetSessions) -> list[Session]:
        account = await acting_for(peer, request.user, self._context.settings)
        return self._context.book.sessions(account and account.name, request.active)

    @handles(protocol.GetSession)
    async def session(self, peer: Peer, request: protocol.GetSession) -> Session:
        account = await acting_for(peer, request.user, self._context.settings)
        return self._context.book.session(request.name, account and account.name)

    @handles(protocol.Note)
    async def note(self, peer: Peer, request: protocol.Note) -> None:
        context, book = self._context, self._context.book
        job_id = book.job_of(request.job_id, request.user, request.session)
        if request.note.server is ServerStatus.READY and book.is_of(job_id, request.user):
            # Who hears that a session is ready asks for its nodes and its end, which only Slurm knows.
            await context.watch.catch_up(job_id)
            job_id = book.job_of(request.job_id, request.user, request.session)
        book.note(job_id, request.user, request.note)
        await context.feed.notify()
        await book.save()
        if request.note.ending:
            context.audit.succeeded(peer, request, request.user)

    async def read_log_tails(self) -> None:
        """Read the log tails of sessions that failed by themselves; one that hangs delays no other."""
        feed = self._context.feed
        async with asyncio.TaskGroup() as tasks:
            while True:
                since = feed.change
                for job in self._unread():
                    self._reading.add(job.id)
                    tasks.create_task(self._read_log_tail(job))
                await feed.wait(since, protocol.MAXIMUM_WAIT, lambda: bool(self._unread()))

    def _unread(self) -> list[Job]:
        return [job for job in self._context.book.without_log() if job.id not in self._reading]

    async def _read_log_tail(self, job: Job) -> None:
        text = ""
        try:
            text = await self._files.log_tail(job)
        except (CarmeError, TimeoutError) as error:
            _log.info("The log of job %s cannot be read: %s", job.id, error or "it took too long")
        except Exception:
            _log.exception("The log of job %s cannot be read.", job.id)  # the broker goes on without it
        self._reading.discard(job.id)
        self._context.book.logged(job.id, text)
        await self._context.feed.notify()
        await self._context.book.save()
