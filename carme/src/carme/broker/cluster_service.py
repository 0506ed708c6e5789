"""Answers about the cluster: nodes, what will be free, what users may use, what jobs used, and changes."""

from carme.broker import protocol
from carme.broker.bookings import Bookings
from carme.broker.context import Context
from carme.broker.dispatch import handles
from carme.broker.forecasts import Forecasts
from carme.broker.jobs import Jobs
from carme.broker.overview import Overview, SessionFigures
from carme.broker.peers import Peer, acting_for, owner_of_job
from carme.broker.policy import Policy
from carme.broker.protocol import EventBatch
from carme.broker.reports import Reports
from carme.jobs import Access, Cluster, Forecast
from carme.reports import JobWarning, Report


class ClusterService:
    """Answers about the cluster as a whole, and about what jobs on it use."""

    def __init__(
        self, context: Context, jobs: Jobs, bookings: Bookings, reports: Reports, policy: Policy
    ) -> None:
        self._context = context
        self._jobs = jobs
        self._reports = reports
        self._policy = policy
        self._forecasts = Forecasts(context.watch, bookings)

    @handles(protocol.GetCluster)
    async def cluster(self, peer: Peer, _: protocol.GetCluster) -> Cluster:
        return self._context.watch.cluster()

    @handles(protocol.GetForecast)
    async def forecast(self, peer: Peer, _: protocol.GetForecast) -> Forecast:
        return await self._forecasts.current()

    @handles(protocol.GetReport)
    async def report(self, peer: Peer, request: protocol.GetReport) -> Report:
        job = await self._jobs.find(peer, request.job_id, request.user)
        async with self._context.accounting.slot(peer.account.uid):
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
        async with self._context.accounting.slot(peer.account.uid):
            return await self._context.slurm.coordinated_accounts(account.name)

    @handles(protocol.GetOverview)
    async def overview(self, peer: Peer, _: protocol.GetOverview) -> Overview:
        sessions = [SessionFigures.of(session) for session in self._context.book.after(None, None)]
        return self._context.watch.overview().model_copy(update={"sessions": sessions})

    @handles(protocol.GetEvents)
    async def events(self, peer: Peer, request: protocol.GetEvents) -> EventBatch:
        feed, book = self._context.feed, self._context.book
        user = None if peer.trusted else peer.account.name
        self._context.watch.jobs()  # raises when there is no snapshot
        since = feed.since(request.cursor)
        if since is not None and request.wait > 0:
            known = since

            def changed() -> bool:
                return bool(self._context.watch.after(known, user) or book.after(known, user))

            await feed.wait(since, request.wait, changed)
            since = feed.since(request.cursor)
        return EventBatch(
            jobs=self._context.watch.after(since or 0, user),
            sessions=book.after(since, user),
            cursor=feed.cursor,
            complete=since is None,
        )
