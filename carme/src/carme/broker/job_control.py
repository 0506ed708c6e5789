"""Cancels jobs and gives them more time."""

import asyncio

from carme.broker import protocol
from carme.broker.context import Context
from carme.broker.dispatch import handles
from carme.broker.extensions import Extensions
from carme.broker.jobs import Jobs
from carme.broker.peers import Peer, acting_for
from carme.broker.stage_in import StageIns
from carme.errors import Denied
from carme.jobs import Job, arrays
from carme.sessions import Ending, Extension
from carme.slurm import UnixAccount
from carme.translation import message as _


class JobControl:
    """Changes jobs that Slurm has."""

    def __init__(self, context: Context, jobs: Jobs, stage_ins: StageIns) -> None:
        self._context = context
        self._jobs = jobs
        self._stage_ins = stage_ins
        self._extensions = Extensions(context.settings, context.slurm, context.book.records.known)

    @handles(protocol.Cancel)
    async def cancel(self, peer: Peer, request: protocol.Cancel) -> None:
        context, job_id, task = self._context, request.job_id, request.task
        if request.session is not None:
            account = await acting_for(peer, request.user, context.settings)
            job_id = context.book.job_of(job_id, account and account.name, request.session)
        job = await self._jobs.find(peer, job_id, request.user, task)
        # An array's number means all of it, although the last of its tasks to start has the same.
        whole = task is None and job.array_id == job.id
        if self._is_over(job, whole):
            return
        name = str(job_id) if whole else job.slurm_name if task is None else arrays.task_name(job_id, task)
        owner = await asyncio.to_thread(UnixAccount.named, job.user)
        what = {"job_id": job_id} | ({"task": name} if task is not None else {})
        # A service that names no user acts for an administrator.
        by_admin = peer.trusted and request.user is None
        with context.audit.audited(peer, request, job.user, **what):
            if owner.uid < context.settings.broker.minimum_uid:
                raise Denied(
                    _(
                        "Job {job_id} belongs to the system account {owner_name}.",
                        job_id=job_id,
                        owner_name=owner.name,
                    ),
                    _("Cancel it with 'scancel'."),
                )
            with context.book.cancelling(job_id, Ending.CANCELLED_BY_ADMIN if by_admin else Ending.STOPPED):
                context.watch.unwanted(job_id)
                async with context.cancels.slot(owner.uid):
                    await context.slurm.cancel(name, owner)
        if whole or job.array_id is None:  # else other tasks may still want the data
            await self._stage_ins.cancel_for(job, owner)
        await context.feed.notify()
        await context.book.save()
        context.watch.poll_soon()

    def _is_over(self, job: Job, whole: bool) -> bool:
        """Whether a job is over, or the whole array that it stands for."""
        if not whole:
            return job.is_over
        return not any(task.is_active for task in self._context.watch.jobs() if task.array_id == job.id)

    @handles(protocol.Extend)
    async def extend(self, peer: Peer, request: protocol.Extend) -> Extension:
        context = self._context
        job = await self._jobs.find(peer, request.job_id, request.user)
        with context.audit.audited(peer, request, job.user, job_id=job.id) as entry:
            extension = await self._extensions.extend(job, request.minutes, context.watch.cluster())
            entry.add(limit=extension.minutes_limit)
        context.watch.poll_soon()
        return extension
