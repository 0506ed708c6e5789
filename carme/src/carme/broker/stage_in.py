"""Runs stage-in jobs: they copy data to nodes before the jobs that need it begin."""

import asyncio
import contextlib
import logging
from dataclasses import replace

from carme.broker import protocol
from carme.broker.background import Rounds
from carme.broker.context import Context
from carme.broker.dispatch import handles
from carme.broker.files import JobFiles
from carme.broker.peers import Peer, owner_of_job
from carme.broker.staging import (
    booked_stage_in_order,
    data_features,
    is_stage_in_of,
    preference,
    progress_line,
    stage_in_order,
)
from carme.broker.submitter import Submitter
from carme.errors import CarmeError, SlurmError
from carme.jobs import Job, JobRequest
from carme.jobs.nodes import expand
from carme.slurm import Order, UnixAccount

_log = logging.getLogger("carme.broker")

PROGRESS_SECONDS = 2.0  # between two checks of how far the data of waiting jobs is
LOGS_AT_ONCE = 4  # read for that; others need places for their programs, too


class StageIns:
    """Submits, follows and cancels stage-in jobs."""

    def __init__(self, context: Context, submitter: Submitter, files: JobFiles) -> None:
        self._context = context
        self._submitter = submitter
        self._files = files
        #: By stage-in job the features of the nodes that the job behind it shall prefer; empty once it does.
        self._features: dict[int, list[str]] = {}
        #: By waiting job how far its data is.
        self._progress: dict[int, str] = {}

    @handles(protocol.StageIn)
    async def to_booked_nodes(self, peer: Peer, request: protocol.StageIn) -> int | None:
        context = self._context
        owner = await owner_of_job(peer, request.user, context.settings)
        for job in context.watch.jobs():
            if job.key and (job.user, job.name, job.is_active) == (owner.name, request.name, True):
                return job.id
        with context.audit.audited(peer, request, owner.name) as entry:
            order = await self._submitter.order(await self._as_job(request, owner), owner)
            cluster = await context.watch.poll_nodes()
            order = booked_stage_in_order(order, request.node_names, owner, cluster)
            if order is None:
                entry.drop()
                return None
            async with context.programs.slot(owner.uid):
                job_id = await self._submitter.start(order, owner)
            entry.add(job_id=job_id)
        await self._submitter.track(order, owner, job_id)
        return job_id

    async def submit_for(self, order: Order, owner: UnixAccount) -> Order:
        """The order, which begins when a stage-in job, submitted here, has copied the data."""
        context = self._context
        # Copies come and go faster than the snapshot is renewed.
        cluster = await context.watch.poll_nodes()
        order = replace(order, prefer=preference(order, owner, cluster))
        most = await self._most_minutes(owner, order.account, order.partition, order.request.qos)
        first = stage_in_order(order, owner, cluster, min([context.settings.staging.minutes, *most]))
        if first is None:
            return order
        try:
            async with context.programs.slot(owner.uid):
                job_id = await self._submitter.start(first, owner)
        except CarmeError as error:
            if error.code == "slurm-away":
                await context.watch.abandon(first.key)  # Slurm may have taken it all the same
            raise
        self._features[job_id] = data_features(order, owner)
        await self._submitter.track(first, owner, job_id)
        return replace(order, after=job_id)

    async def cancel(self, job_id: int, owner: UnixAccount) -> None:
        """Cancel the stage-in job of a job that is not to run any more."""
        watch = self._context.watch
        watch.unwanted(job_id)
        try:
            async with self._context.cancels.slot(owner.uid):
                await self._context.slurm.cancel(str(job_id), owner)
        except CarmeError as error:
            job = watch.job(job_id)
            if error.code == "busy" and job and job.key:
                await watch.abandon(job.key)  # the polls cancel it

    async def cancel_for(self, job: Job, owner: UnixAccount) -> None:
        """Cancel the stage-in jobs of a job that was cancelled."""
        for stage_in in [
            stage_in
            for stage_in in self._context.watch.jobs()
            if stage_in.is_active and is_stage_in_of(stage_in, job)
        ]:
            await self.cancel(stage_in.id, owner)

    async def follow(self) -> None:
        """Report how far the data of waiting jobs is, and have those jobs prefer its nodes."""
        rounds = Rounds("Following data on its way")
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            await rounds.attempt(self._follow_once())

    async def _follow_once(self) -> None:
        with contextlib.suppress(CarmeError):
            await self._follow_jobs()

    async def _follow_jobs(self) -> None:
        jobs = [job for job in self._context.watch.jobs() if job.key and job.is_active]
        found: list[tuple[Job, Job]] = []
        for job in [job for job in jobs if job.is_pending and job.reason == "Dependency"]:
            first = next((candidate for candidate in jobs if is_stage_in_of(candidate, job)), None)
            if first is not None and first.is_running:
                found.append((first, job))
        for first, job in found:
            await self._prefer_nodes_of(first, job)
        waiting = {job.id for _first, job in found}
        self._progress = {key: text for key, text in self._progress.items() if key in waiting}
        self._context.watch.data_is(dict(self._progress))
        places = asyncio.Semaphore(LOGS_AT_ONCE)
        await asyncio.gather(*(self._report_progress(first, job, places) for first, job in found))
        ids = {job.id for job in jobs}
        self._features = {key: value for key, value in self._features.items() if key in ids}

    async def _report_progress(self, stage_in: Job, job: Job, places: asyncio.Semaphore) -> None:
        """Report how far a job's data is as soon as its log is read; the home of another owner may hang."""
        async with places:
            self._progress[job.id] = await self._progress_of(stage_in)
        self._context.watch.data_is(dict(self._progress))

    async def _progress_of(self, stage_in: Job) -> str:
        """The last message about the data in the log of a stage-in job."""
        try:
            return progress_line(await self._files.log_tail(stage_in))
        except (CarmeError, TimeoutError):
            pass
        except Exception as error:
            _log.warning("The log of job %s cannot be read: %r", stage_in.id, error)  # others' can
        return ""

    async def _prefer_nodes_of(self, stage_in: Job, job: Job) -> None:
        """Have a job prefer the nodes to which its data is on its way; whether it came, they report."""
        wanted = self._features.get(stage_in.id)
        if not wanted or not stage_in.node_list:
            return
        self._features[stage_in.id] = []
        try:
            for node in expand(stage_in.node_list):
                await self._context.slurm.add_features(node, wanted)
            await self._context.slurm.set_preference(job.id, "&".join(wanted))
        except SlurmError as error:
            _log.warning("Job %s cannot prefer the nodes that have its data: %s", job.id, error)

    async def _as_job(self, request: protocol.StageIn, owner: UnixAccount) -> JobRequest:
        """The request of a job that needs the data and has no command."""
        account = request.account or self._context.settings.slurm.default_account
        most = await self._most_minutes(owner, account, request.partition, None)
        return JobRequest(
            name=request.name,
            kind="batch",
            command=["-"],
            partition=request.partition,
            account=request.account,
            nodes=len(request.node_names),
            minutes=min([request.minutes, *most]),
            stage=request.stage,
        )

    async def _most_minutes(
        self, owner: UnixAccount, account: str | None, partition: str, qos: str | None
    ) -> list[int]:
        """How long the partition and the accounting let a job run, as far as they have limits.

        What would take longer Slurm lets wait for ever, and what depends on it as well.
        """
        access = await self._context.accesses.of(owner)
        partitions = self._context.watch.cluster().partitions
        limits = [each.max_minutes for each in partitions if each.name == partition]
        limits.append(access.longest_minutes(account, partition, qos))
        return [limit for limit in limits if limit]
