"""Checks job requests and submits them."""

from dataclasses import replace
from datetime import UTC, datetime

from carme.broker import protocol
from carme.broker.context import Context
from carme.broker.dispatch import handles
from carme.broker.files import JobFiles
from carme.broker.jobs import Jobs
from carme.broker.peers import Peer, owner_of_job
from carme.broker.stage_in import StageIns
from carme.broker.submitter import Submitter
from carme.errors import CarmeError, InvalidRequest, SlurmError
from carme.jobs import StartEstimate, arrays
from carme.sessions.start_estimates import planned, used_share
from carme.slurm import Order, UnixAccount
from carme.translation import message as _


class Submissions:
    """Starts jobs."""

    def __init__(
        self, context: Context, jobs: Jobs, files: JobFiles, submitter: Submitter, stage_ins: StageIns
    ) -> None:
        self._context = context
        self._jobs = jobs
        self._files = files
        self._submitter = submitter
        self._stage_ins = stage_ins

    @handles(protocol.Submit)
    async def submit(self, peer: Peer, request: protocol.Submit) -> int:
        context = self._context
        owner = await owner_of_job(peer, request.user, context.settings)
        order = None
        with context.audit.audited(peer, request, owner.name) as entry:
            try:
                order = await self._submitter.order(request.request, owner)
                if request.request.stage:
                    order = await self._stage_ins.submit_for(order, owner)
                async with context.programs.slot(owner.uid):
                    job_id = await self._start(order, owner)
            except CarmeError as error:
                if order and error.code == "slurm-away":
                    await context.watch.abandon(order.key)  # Slurm may have taken it all the same
                if order and order.after is not None:
                    await self._stage_ins.cancel(order.after, owner)
                raise
            entry.add(job_id=job_id, key=order.key)
        await self._submitter.track(order, owner, job_id)
        return job_id

    @handles(protocol.Resubmit)
    async def resubmit(self, peer: Peer, request: protocol.Resubmit) -> int:
        job = await self._jobs.find(peer, request.job_id, request.user, request.task)
        again = await self._files.request_of(peer, job.id, request.user)
        task = job.task if job.id != job.array_id else None
        if request.tasks is not None:
            if again.array is None:
                raise InvalidRequest(
                    _("Job {job_id} is not an array, so it has no tasks.", job_id=job.id),
                    _("Submit it again without naming tasks."),
                    field="tasks",
                )
            again = again.model_copy(update={"array": arrays.limited(request.tasks, again.array)})
        elif (task := task if request.task is None else request.task) is not None:
            again = again.model_copy(update={"array": str(task)})
        return await self.submit(peer, protocol.Submit(again, job.user))

    @handles(protocol.TestStart)
    async def test(self, peer: Peer, request: protocol.TestStart) -> StartEstimate:
        owner = await owner_of_job(peer, request.user, self._context.settings)
        order = await self._submitter.order(request.request, owner)
        async with self._context.programs.slot(owner.uid):
            found = await self._context.slurm.estimate(order, owner)
        if found.start is None:
            return found
        when = planned(found.start, used_share(self._context.watch.jobs()), datetime.now(UTC))
        return found.model_copy(update={"earliest": when.earliest})

    async def _start(self, order: Order, owner: UnixAccount) -> int:
        try:
            return await self._submitter.start(order, owner)
        except SlurmError as error:
            if not order.prefer or error.code == "slurm-away":
                raise
            # The copies may be gone since the last poll, and Slurm knows no such nodes any more.
            return await self._submitter.start(replace(order, prefer=""), owner)
