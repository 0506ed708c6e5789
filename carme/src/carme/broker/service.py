"""The broker: it watches Slurm, and passes the requests of identified peers to its services."""

import asyncio
import sys
from typing import Any

from carme.broker import protocol
from carme.broker.access_cache import AccessCache
from carme.broker.administration import Administration
from carme.broker.audit import AuditLog
from carme.broker.background import Rounds
from carme.broker.bookings import Bookings
from carme.broker.cluster_service import ClusterService
from carme.broker.concurrency import ConcurrencyLimit
from carme.broker.context import Context
from carme.broker.dispatch import Dispatcher
from carme.broker.feed import Feed
from carme.broker.files import JobFiles
from carme.broker.job_control import JobControl
from carme.broker.jobs import Jobs
from carme.broker.peers import Peer
from carme.broker.policy import Policy, broker_peer
from carme.broker.reports import Reports
from carme.broker.session_service import SessionService
from carme.broker.sessions import SessionBook
from carme.broker.stage_in import StageIns
from carme.broker.store import Store
from carme.broker.submission import Submissions
from carme.broker.submitter import Submitter
from carme.broker.watch import Watch
from carme.config import Settings
from carme.images import ImageCatalogue
from carme.jobs import Job
from carme.slurm import Slurm

TIDY_SECONDS = 3600.0
PROGRAMS_AT_ONCE, PROGRAMS_PER_USER = 16, 4  # run as users; protects this host
ACCOUNTING_AT_ONCE, ACCOUNTING_PER_USER = 4, 2  # questions to slurmdbd; protects the cluster
#: Seconds until a program may run. A request has three programs at most, one after the other; clients wait
#: longer than for all these places and for one program that hangs, which then ends the request.
PROGRAMS_PATIENCE = 8.0


class Broker:
    """Makes the broker's services, has them work, and passes the requests of identified peers to them.

    Args:
        python: The interpreter of the small programs that run as users.
    """

    def __init__(self, settings: Settings, slurm: Slurm, python: str = sys.executable) -> None:
        feed = Feed()
        book = SessionBook(Store(settings.broker.state_directory), feed)
        self._context = context = Context(
            settings=settings,
            slurm=slurm,
            feed=feed,
            book=book,
            watch=Watch(slurm, settings.slurm.poll_seconds, feed, book),
            accesses=AccessCache(slurm),
            images=ImageCatalogue(settings.images.directory),
            audit=AuditLog(settings.broker.audit_log),
            programs=ConcurrencyLimit(PROGRAMS_AT_ONCE, PROGRAMS_PER_USER, PROGRAMS_PATIENCE),
            cancels=ConcurrencyLimit(PROGRAMS_AT_ONCE, PROGRAMS_PER_USER, PROGRAMS_PATIENCE),
            accounting=ConcurrencyLimit(ACCOUNTING_AT_ONCE, ACCOUNTING_PER_USER),
            python=python,
        )
        self._watch = context.watch
        self._bookings = Bookings(settings, slurm)
        self._reports = Reports(settings, slurm, context.watch, feed)
        self._policy = Policy(settings, context.watch, context.audit, self._stop_by_policy)
        self._jobs = Jobs(context)
        files = JobFiles(context, self._jobs)
        submitter = Submitter(context)
        self._stage_ins = StageIns(context, submitter, files)
        self._control = JobControl(context, self._jobs, self._stage_ins)
        self._sessions = SessionService(context, files)
        submissions = Submissions(context, self._jobs, files, submitter, self._stage_ins)
        administration = Administration(context, self._bookings)
        self._cluster = ClusterService(context, self._jobs, self._bookings, self._reports, self._policy)
        services = (submissions, self._stage_ins, self._control, self._sessions, administration)
        self._dispatcher = Dispatcher(context.audit, (self._cluster, self._jobs, files, *services))

    async def prepare(self) -> None:
        """Make what must be there before the first request. Raises OSError, CarmeError."""
        self._context.audit.prepare()
        self._watch.remember(await self._context.book.open())

    async def run(self) -> None:
        """Watch Slurm until cancelled, then keep what is known."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch.run())
                tasks.create_task(self._sessions.read_log_tails())
                tasks.create_task(self._tidy())
                tasks.create_task(self._reports.run())
                tasks.create_task(self._policy.run())
                tasks.create_task(self._stage_ins.follow())
        finally:
            await self._context.book.close()

    async def answer(self, peer: Peer, line: bytes) -> Any:
        """The result of one request line. Raises the error that the peer gets."""
        return await self._dispatcher.answer(peer, line)

    async def _tidy(self) -> None:
        rounds = Rounds("Forgetting old sessions")
        while True:
            await rounds.attempt(self._forget_old())
            await asyncio.sleep(TIDY_SECONDS)

    async def _forget_old(self) -> None:
        self._context.book.expire()
        await self._context.book.save()

    async def _stop_by_policy(self, job: Job) -> None:
        task = job.task if job.array_id == job.id else None
        await self._control.cancel(broker_peer(), protocol.Cancel(job.id, task=task))
