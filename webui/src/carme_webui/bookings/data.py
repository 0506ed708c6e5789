"""Brings the data of sessions that bookings start to the booked nodes before the bookings begin.

A job of Slurm's, without GPUs and in the owner's name, copies it; it may run beside other jobs, and Slurm
starts it only where it ends before the booking begins. What is not there by then the session brings itself.
Each round works out the changes anew, and the job has a name of its own, so that two rounds, or one
after a crash, make one.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings

from carme.bookings import BookingState
from carme.broker import BrokerClient
from carme.errors import BrokerUnavailable, CarmeError, NotFound, SlurmError
from carme.jobs import Job, JobState, Stage
from carme.translation import message
from carme_webui.bookings import notes
from carme_webui.bookings.models import Booking

__all__ = ["bring", "job_name", "stages_of"]

logger = logging.getLogger(__name__)

#: For so long a job that was requested may not be in the queue yet.
PATIENCE = timedelta(minutes=2)


def stages_of(row: Booking) -> list[Stage]:
    """What a booking's session wants near it."""
    return [Stage.model_validate(each) for each in row.session_stage]


def job_name(row: Booking) -> str:
    """The name of the job that brings it; another one when the nodes, the time or the data are others."""
    what = [row.node_names, row.session_stage, row.start.isoformat(), row.owner.username]
    digest = hashlib.blake2b(json.dumps(what).encode(), digest_size=4).hexdigest()
    return f"stage-{row.name.removeprefix('carme-')}-{digest}"


def bring(broker: BrokerClient, jobs: Iterable[Job], now: datetime) -> None:
    """One round.

    Args:
        jobs: Slurm's, those that ended minutes ago included.
    """
    # Anybody may give a job of another kind any name.
    batch_jobs = [job for job in jobs if job.kind == "batch"]
    known = {(job.user, job.name): job for job in sorted(batch_jobs, key=lambda job: job.id)}
    begun = Booking.objects.filter(stage_job__isnull=False, staged=None, stage_problem="")
    for row in begun.exclude(state=BookingState.APPROVED, start__gt=now).select_related("owner"):
        _stop(row, broker)  # it is over, or its session brings the rest
    lead = timedelta(minutes=settings.SITE.staging.minutes)
    coming = Booking.open().filter(state=BookingState.APPROVED, start__gt=now)
    for row in coming.exclude(session_image="", stage_job=None):
        wanted = job_name(row) if row.session_image and any(each.is_ahead for each in stages_of(row)) else ""
        if row.stage_name != wanted:
            _stop(row, broker)
            fresh = {"stage_name": wanted, "stage_requested": None, "staged": None, "stage_problem": ""}
            if not Booking.objects.filter(pk=row.pk, stage_name=row.stage_name).update(**fresh):
                continue
            row.refresh_from_db()
        if not wanted or row.staged or row.stage_problem or row.start - now > lead:
            continue
        job = known.get((row.owner.username, wanted)) or _known(row, broker)
        if job is None:
            _begin(row, broker, now)
        elif job.is_over:
            _note_end(row, job, now)


def _known(row: Booking, broker: BrokerClient) -> Job | None:
    """The job, which Slurm's queue does not know any more."""
    if row.stage_job is None:
        return None
    try:
        job = broker.job(row.stage_job, user=row.owner.username)
    except CarmeError:
        return None
    return job if job.kind == "batch" and job.name == row.stage_name else None


def _begin(row: Booking, broker: BrokerClient, now: datetime) -> None:
    if row.stage_requested and now - row.stage_requested < PATIENCE:
        return
    if not Booking.objects.filter(pk=row.pk, stage_requested=row.stage_requested).update(stage_requested=now):
        return  # another round does
    minutes = min(settings.SITE.staging.minutes, (row.start - now) // timedelta(minutes=1))
    if minutes < 1:
        return
    try:
        number = broker.bring(
            row.stage_name,
            stages_of(row),
            row.partition,
            row.node_names,
            minutes,
            row.owner.username,
            row.project.account if row.project else None,
        )
    except CarmeError as error:
        if isinstance(error, BrokerUnavailable) or (
            isinstance(error, SlurmError) and error.code == "slurm-away"
        ):
            logger.warning("The data of booking %s is brought later: %s", row.name, error)
        else:
            _fail(row, error.text)
        return
    values = {"staged": now} if number is None else {"stage_job": number}
    Booking.objects.filter(pk=row.pk, stage_name=row.stage_name).update(**values)
    logger.info("The data of booking %s: %s.", row.name, f"job {number}" if number else "it is there")


def _note_end(row: Booking, job: Job, now: datetime) -> None:
    if job.state is JobState.COMPLETED:
        Booking.objects.filter(pk=row.pk).update(staged=now, stage_job=job.id)
        return
    Booking.objects.filter(pk=row.pk).update(stage_job=job.id)
    words = message(
        "Job {number}, which was to bring the data, has failed: {why}", number=job.id, why=job.explanation
    )
    _fail(row, words)


def _fail(row: Booking, why: str) -> None:
    if Booking.objects.filter(pk=row.pk, stage_problem="").update(stage_problem=why):
        row.stage_problem = why
        notes.notify_of_missing_data(row)


def _stop(row: Booking, broker: BrokerClient) -> None:
    """End the job, if there is one; what it has copied stays until its place is needed, as all copies do."""
    if row.stage_job is not None and row.staged is None:
        try:
            broker.cancel(row.stage_job, user=row.owner.username)
        except NotFound:
            pass
        except CarmeError as error:
            logger.warning("Job %s of booking %s is ended later: %s", row.stage_job, row.name, error)
            return
    Booking.objects.filter(pk=row.pk).update(stage_job=None)
