"""Gives running jobs more time, one at a time."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from carme.config import Settings
from carme.errors import InvalidRequest, NotFound
from carme.jobs import Cluster, Job
from carme.jobs.extensions import extended_limit
from carme.sessions import Extension
from carme.slurm import Slurm
from carme.translation import message as _


class Extensions:
    """Extends jobs as the site's policy, Slurm's limits and the schedule allow.

    Args:
        known: A job of Slurm's as what it is on record: policies for sessions must not end with a comment.
    """

    def __init__(self, settings: Settings, slurm: Slurm, known: Callable[[Job], Job]) -> None:
        self._settings = settings
        self._slurm = slurm
        self._known = known
        # Two that were decided on the same snapshot could together take what only one of them may have.
        self._turn = asyncio.Lock()

    async def extend(self, job: Job, minutes: int, cluster: Cluster) -> Extension:
        """Let a job run so many minutes longer.

        Args:
            job: The job; what matters of it is read anew from Slurm.
            cluster: Its nodes and partitions.

        Raises:
            InvalidRequest: Why not, and how much longer it may run.
            SlurmError: Slurm refused, or is away.
        """
        async with self._turn:
            jobs = list(map(self._known, await self._slurm.queue()))
            reservations = await self._slurm.reservations()
            limits = await self._slurm.limits([job.user])
            present = next((each for each in jobs if each.id == job.id), job)
            limit = extended_limit(
                present,
                minutes,
                policy=self._settings.session_policy(present.partition),
                cluster=cluster,
                jobs=jobs,
                reservations=reservations,
                limits=limits,
                now=datetime.now(UTC),
            )
            try:
                await self._slurm.set_limit(present.slurm_name, limit)
            except NotFound:
                raise InvalidRequest(
                    _("Job {job_id} ended before it could be extended.", job_id=job.id),
                    _("Start it again with the time that it needs."),
                    field="job_id",
                ) from None
        assert present.ends is not None and present.minutes_limit is not None  # else it could not be extended
        return Extension(
            ends=present.ends + timedelta(minutes=limit - present.minutes_limit), minutes_limit=limit
        )
