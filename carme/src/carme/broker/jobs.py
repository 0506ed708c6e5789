"""Finds jobs: in the snapshot of the queue, on record, in Slurm's accounting."""

from datetime import UTC, datetime, timedelta

from carme.broker import protocol
from carme.broker.context import Context
from carme.broker.dispatch import handles
from carme.broker.overview import RunningJob
from carme.broker.peers import Peer, acting_for
from carme.errors import NotFound, SlurmError
from carme.jobs import Job, Phase, arrays
from carme.translation import message as _

HISTORY = timedelta(days=7)  # how far back `history` goes by default


class Jobs:
    """Finds the jobs that a peer may see."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: The jobs that ran when that was requested last, and what a calendar shows of them, by number.
        self._shown: dict[int, tuple[Job, RunningJob]] = {}

    async def find(self, peer: Peer, job_id: int, user: str | None, task: int | None = None) -> Job:
        """A job, or a task of an array. Raises NotFound; also when it is somebody else's."""
        context = self._context
        account = await acting_for(peer, user, context.settings)
        job = context.watch.job(job_id) if task is None else context.watch.task(job_id, task)
        if job is None:
            try:
                async with context.accounting.slot(peer.account.uid):
                    job = await context.slurm.accounted(job_id, task)
                job = job and context.book.records.known(job)
            except SlurmError as error:
                if error.code != "no-accounting":
                    raise
            else:
                if job is None and task is not None:
                    job = context.book.records.never_begun(job_id, task, account and account.name)
        # Whose job it is must not be reported to others, so that is the same answer.
        if job is None or (account is not None and job.user != account.name):
            name = job_id if task is None else arrays.task_name(job_id, task)
            raise NotFound(
                _("There is no job {name} of {user}.", name=name, user=account.name)
                if account
                else _("There is no job {name}.", name=name),
                _("See 'carme jobs --history' for the jobs that there are."),
            )
        return job

    @handles(protocol.GetJob)
    async def job(self, peer: Peer, request: protocol.GetJob) -> Job:
        return await self.find(peer, request.job_id, request.user, request.task)

    @handles(protocol.GetJobs)
    async def jobs(self, peer: Peer, request: protocol.GetJobs) -> list[Job]:
        account = await acting_for(peer, request.user, self._context.settings)
        return [
            job
            for job in self._context.watch.jobs()
            if (account is None or job.user == account.name) and (job.is_active or not request.active)
        ]

    @handles(protocol.GetRunning)
    async def running(self, peer: Peer, _: protocol.GetRunning) -> list[RunningJob]:
        # Of thousands of jobs few have changed since the last question.
        before, self._shown = self._shown, {}
        for job in self._context.watch.jobs():
            if job.state.phase is Phase.RUNNING:
                known = before.get(job.id)
                self._shown[job.id] = known if known and known[0] is job else (job, RunningJob.of(job))
        return [shown for _job, shown in self._shown.values()]

    @handles(protocol.GetHistory)
    async def history(self, peer: Peer, request: protocol.GetHistory) -> list[Job]:
        context = self._context
        account = await acting_for(peer, request.user, context.settings)
        since = request.since or datetime.now(UTC) - HISTORY
        async with context.accounting.slot(peer.account.uid):
            found = await context.slurm.history(
                account.name if account else None, since, request.limit, request.until
            )
        return list(map(context.book.records.known, found))
