"""Keeps the portal's jobs equal to Slurm's."""

import logging
from datetime import timedelta

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.errors import CarmeError, NotFound
from carme.jobs import JobState
from carme_webui.jobs.models import Job, Mirror

__all__ = ["mirror"]

logger = logging.getLogger(__name__)

HISTORY_LIMIT = 10_000
SWEEP_EVERY = timedelta(seconds=60)


def mirror(broker: BrokerClient) -> None:
    """Read the broker's news once and store them.

    Raises:
        CarmeError: The broker does not answer or refuses; nothing is lost, the next round goes on.
    """
    state = Mirror.load()
    batch = broker.events(state.cursor or None)
    now = timezone.now()
    if batch.complete:
        # The portal missed something: it is new, or it or the broker was away.
        _fill_gap(broker, state)
    with transaction.atomic():
        Job.store(batch.jobs)
        Mirror.objects.filter(pk=state.pk).update(cursor=batch.cursor, updated=now, failure="")
    if batch.complete or state.swept is None or now - state.swept > SWEEP_EVERY:
        _sweep(broker)
        Mirror.objects.filter(pk=state.pk).update(swept=now)


def _fill_gap(broker: BrokerClient, state: Mirror) -> None:
    """Store the jobs that accounting has of the time in which nobody looked."""
    since = state.updated - timedelta(hours=1) if state.updated else None
    try:
        past = broker.history(since=since, limit=HISTORY_LIMIT)
    except CarmeError as error:
        # A site may have no accounting; the present is still worth showing.
        logger.warning("The history of jobs could not be read: %s", error)
        return
    Job.store(past)


def _sweep(broker: BrokerClient) -> None:
    """Find out how the jobs ended that are active here and no longer in the queue."""
    queued = {job.id for job in broker.jobs(active=True)}
    for row in Job.objects.filter(active=True).exclude(id__in=queued):
        try:
            Job.store([broker.job(row.id, user=row.user)])
        except NotFound:
            row.state = JobState.UNKNOWN
            row.explanation = _("Slurm no longer knows how this job ended.")
            row.active = False
            row.save()
