"""The broker: it watches Slurm, and answers the requests of identified peers."""

import asyncio
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from carme.broker import protocol
from carme.broker.access import Peer, acting_for, owner_of_job
from carme.broker.accesses import Accesses
from carme.broker.administration import Administration
from carme.broker.audit import AuditLog
from carme.broker.bookings import Bookings
from carme.broker.concurrency import ConcurrencyLimit
from carme.broker.context import Context
from carme.broker.dispatch import Dispatcher, handles
from carme.broker.feed import Feed
from carme.broker.files import JobFiles
from carme.broker.job_control import JobControl
from carme.broker.jobs import Jobs
from carme.broker.overview import Overview, SessionFigures
from carme.broker.policy import Policy, itself
from carme.broker.protocol import EventBatch
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
from carme.jobs import Access, Cluster, Forecast, Job, Reservation, forecast
from carme.reports import JobWarning, Report
from carme.slurm import Slurm

TIDY_SECONDS = 3600.0
FORECAST_AGE = timedelta(minutes=1)
# Where a forecast takes more seconds of a processor than this, the next one rests so many times as long.
FORECAST_TAKES, FORECAST_REST = 0.1, 25.0
PROGRAMS_AT_ONCE, PROGRAMS_OF_ONE_USER = 16, 4  # run as users; protects this host
ACCOUNTING_AT_ONCE, ACCOUNTING_OF_ONE_USER = 4, 2  # questions to slurmdbd; protects the cluster


class Broker:
    """Answers the requests of identified peers; what concerns the cluster it answers itself.

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
            accesses=Accesses(slurm),
            images=ImageCatalogue(settings.images.directory),
            audit=AuditLog(settings.broker.audit_log),
            programs=ConcurrencyLimit(PROGRAMS_AT_ONCE, PROGRAMS_OF_ONE_USER),
            accounting=ConcurrencyLimit(ACCOUNTING_AT_ONCE, ACCOUNTING_OF_ONE_USER),
            python=python,
        )
        self._watch = context.watch
        self._bookings = Bookings(settings, slurm)
        self._reports = Reports(settings, slurm, context.watch, feed)
        self._policy = Policy(settings, context.watch, context.audit, self._stop_by_policy)
        #: What jobs held when it was made, and the forecast.
        self._forecast: tuple[frozenset[tuple[int, str]], Forecast] | None = None
        self._forecast_rest = 0.0
        self._reserved: tuple[datetime, list[Reservation]] | None = None
        self._jobs = Jobs(context)
        files = JobFiles(context, self._jobs)
        submitter = Submitter(context)
        self._stage_ins = StageIns(context, submitter, files)
        self._control = JobControl(context, self._jobs, self._stage_ins)
        self._sessions = SessionService(context, files)
        submissions = Submissions(context, self._jobs, files, submitter, self._stage_ins)
        administration = Administration(context, self._bookings)
        services = (submissions, self._stage_ins, self._control, self._sessions, administration)
        self._dispatcher = Dispatcher(context.audit, (self, self._jobs, files, *services))

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
        while True:
            self._context.book.expire()
            await self._context.book.save()
            await asyncio.sleep(TIDY_SECONDS)

    async def _stop_by_policy(self, job: Job) -> None:
        task = job.task if job.array_id == job.id else None
        await self._control.cancel(itself(), protocol.Cancel(job.id, task=task))

    @handles(protocol.GetCluster)
    async def cluster(self, peer: Peer, _: protocol.GetCluster) -> Cluster:
        return self._watch.cluster()

    @handles(protocol.GetForecast)
    async def forecast(self, peer: Peer, _: protocol.GetForecast) -> Forecast:
        cluster, jobs = self._watch.cluster(), self._watch.jobs()
        now = datetime.now(UTC).replace(microsecond=0)
        reserved = self._reserved
        if reserved is None or now - reserved[0] > FORECAST_AGE:
            self._reserved = reserved = now, await self._bookings.reservations()
        # What is free now changes with these at once; a plan that takes long to make may lag behind them.
        held = frozenset((job.id, job.node_list) for job in jobs if job.gpus and job.is_running)
        cached = self._forecast
        rests = time.monotonic() < self._forecast_rest
        if cached is None or (not rests and (held != cached[0] or now - cached[1].start > FORECAST_AGE)):
            begun = time.thread_time()
            self._forecast = cached = held, forecast(cluster, jobs, reserved[1], now)
            took = time.thread_time() - begun
            self._forecast_rest = time.monotonic() + (FORECAST_REST * took if took > FORECAST_TAKES else 0.0)
        return cached[1]

    @handles(protocol.GetReport)
    async def report(self, peer: Peer, request: protocol.GetReport) -> Report:
        job = await self._jobs.find(peer, request.job_id, request.user)
        async with self._context.accounting.take(peer.account.uid):
            report = await self._reports.report(job)
        return report.model_copy(update={"advice": [*self._policy.notices(job), *report.advice]})

    @handles(protocol.GetWarnings)
    async def warnings(self, peer: Peer, _: protocol.GetWarnings) -> list[JobWarning]:
        return self._policy.warnings()

    @handles(protocol.GetAccess)
    async def access(self, peer: Peer, request: protocol.GetAccess) -> Access:
        owner = await owner_of_job(peer, request.user, self._context.settings)
        return await self._context.accesses.of(owner)

    @handles(protocol.GetCoordinatedAccounts)
    async def coordinated_accounts(self, peer: Peer, request: protocol.GetCoordinatedAccounts) -> list[str]:
        account = await acting_for(peer, request.user, self._context.settings)
        if account is None:
            return []
        async with self._context.accounting.take(peer.account.uid):
            return await self._context.slurm.coordinated_accounts(account.name)

    @handles(protocol.GetOverview)
    async def overview(self, peer: Peer, _: protocol.GetOverview) -> Overview:
        sessions = [SessionFigures.of(session) for session in self._context.book.after(None, None)]
        return self._watch.overview().model_copy(update={"sessions": sessions})

    @handles(protocol.GetEvents)
    async def events(self, peer: Peer, request: protocol.GetEvents) -> EventBatch:
        feed, book = self._context.feed, self._context.book
        user = None if peer.trusted else peer.account.name
        self._watch.jobs()  # raises when there is no snapshot
        since = feed.since(request.cursor)
        if since is not None and request.wait > 0:
            known = since

            def changed() -> bool:
                return bool(self._watch.after(known, user) or book.after(known, user))

            await feed.wait(since, request.wait, changed)
            since = feed.since(request.cursor)
        return EventBatch(
            jobs=self._watch.after(since or 0, user),
            sessions=book.after(since, user),
            cursor=feed.cursor,
            complete=since is None,
        )
