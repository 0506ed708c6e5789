"""Brings the jobs of the years before the portal into its history, from Slurm's accounting.

The sync mirrors what happens (see `mirror`); this reads backwards, a piece at a time, and the last days
again and again, as what a crashed portal missed is there as well. Any piece may be read twice: a job has one
row, and what the accounting says of a job that is over does not change.
"""

import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme_webui.jobs.models import Job, Mirror

__all__ = ["backfill_jobs"]

logger = logging.getLogger(__name__)

LIMIT = 10_000  # jobs that the broker reports at once
PIECE = timedelta(days=7)
SHORTEST = timedelta(minutes=10)
RECENT = timedelta(days=1)
SECONDS = 30.0  # one round reads as many pieces as it can in this time


def backfill_jobs(broker: BrokerClient, now: datetime | None = None) -> int:
    """One round; the number of jobs that were read.

    Args:
        now: The time; the present one by default.
    """
    now = now or timezone.now()
    begun = timezone.now()
    state = Mirror.load()
    oldest = now - timedelta(days=settings.SITE.portal.history_days)
    count = 0
    try:
        count += _read(broker, now - RECENT, now)[0]
        while True:
            until = state.past or now
            if until <= oldest:
                break
            read, since = _read(broker, max(oldest, until - PIECE), until)
            count += read
            state.past = since
            Mirror.objects.filter(pk=state.pk).update(past=since)
            if (timezone.now() - begun).total_seconds() > SECONDS:
                break
    except CarmeError as error:
        logger.warning("The accounting is read later: %s", error)
    return count


def _read(broker: BrokerClient, since: datetime, until: datetime) -> tuple[int, datetime]:
    """Store the jobs of a time, of a shorter one where there are too many; how many, and since when."""
    while True:
        jobs = broker.history(since=since, until=until, limit=LIMIT)
        if len(jobs) < LIMIT or until - since <= SHORTEST:
            break
        since = until - (until - since) / 2
    # What still waits or runs is the sync's; it knows more of it than the accounting.
    over = [job for job in jobs if job.is_over]
    known = set(
        Job.objects.filter(id__in=[job.id for job in over], active=False).values_list("id", flat=True)
    )
    Job.store(job for job in over if job.id not in known)
    return len(over), since
