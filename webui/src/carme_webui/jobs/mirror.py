"""Keeps the portal's jobs and sessions equal to what the broker says."""

import logging
from collections.abc import Iterable
from datetime import timedelta

from django.db import transaction
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from carme.broker import BrokerClient
from carme.errors import CarmeError, NotFound
from carme.jobs import Job as JobReport
from carme.jobs import JobState
from carme.translation import message, translated
from carme_webui.accounts.models import User
from carme_webui.jobs.models import OLD_AFTER, Job, Mirror
from carme_webui.notifier import notifier
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify
from carme_webui.sessions import mirror as sessions

__all__ = ["follow", "mirror"]

logger = logging.getLogger(__name__)

HISTORY_LIMIT = 10_000
SWEEP_EVERY = timedelta(seconds=60)
# More jobs than this that end at once are reported together.
NOTIFIED_SEPARATELY = 3


def follow(broker: BrokerClient, wait: float = 0.0) -> bool:
    """Read the broker's changes once, and remember if that failed.

    Args:
        broker: The site's broker.
        wait: Seconds to wait for changes where there are none.

    Returns:
        Whether the broker answered.
    """
    try:
        mirror(broker, wait)
    except CarmeError as error:
        if Mirror.objects.exclude(failure=error.text).update(failure=error.text):  # logged once
            logger.warning("The broker's changes could not be read: %s", error)
            notifier.notify_all()
        return False
    return True


def mirror(broker: BrokerClient, wait: float = 0.0) -> None:
    """Read the broker's changes once, store them and notify the pages.

    Raises:
        CarmeError: The broker does not answer or refuses; nothing is lost, the next round goes on.
    """
    state = Mirror.load()
    # After a failure the present is requested, so that pages soon say again what is known.
    batch = broker.events(state.cursor or None, 0.0 if state.failure else wait)
    now = timezone.now()
    if batch.complete:
        # The portal missed something: it is new, or it or the broker was away.
        _fill_gap(broker, state)
    ended = _ending(batch.jobs)
    with transaction.atomic():
        Job.store(batch.jobs)
        sessions.store(batch.sessions)
        Mirror.objects.filter(pk=state.pk).update(cursor=batch.cursor, updated=now, failure="")
    _notify_ended(ended)
    notifier.notify({job.user for job in batch.jobs} | {session.owner for session in batch.sessions})
    if batch.complete or state.swept is None or now - state.swept > SWEEP_EVERY:
        _sweep(broker)
        notifier.notify(sessions.sweep(broker))
        Mirror.objects.filter(pk=state.pk).update(swept=now)
    if state.failure or (state.updated is not None and now - state.updated >= OLD_AFTER):
        notifier.notify_all()  # what pages say of the mirror's silence is over


def _ending(batch: Iterable[JobReport]) -> list[JobReport]:
    """Those batch jobs that were active here up to now and are over."""
    over = {job.id: job for job in batch if job.kind == "batch" and not job.is_active}
    if not over:
        return []
    return [
        over[number] for number in Job.objects.filter(id__in=over, active=True).values_list("id", flat=True)
    ]


def _notify_ended(ended: Iterable[JobReport]) -> None:
    """Notify owners; of an array when all of it is over, of many at once in one sentence."""
    ended = list(ended)
    _notify_of_arrays({(job.user, job.array_id) for job in ended if job.array_id is not None})
    by_user: dict[str, list[JobReport]] = {}
    for job in ended:
        if job.array_id is not None:
            continue
        by_user.setdefault(job.user, []).append(job)
    for owner in User.objects.filter(username__in=by_user) if by_user else ():
        jobs = by_user[owner.username]
        if len(jobs) > NOTIFIED_SEPARATELY:
            numbers = [job.id for job in jobs]
            count = len(jobs)
            notify(
                owner,
                lambda count=count: (
                    ngettext("%d of your jobs has ended.", "%d of your jobs have ended.", count) % count
                ),
                Kind.JOB_OVER,
                key=f"jobs:{min(numbers)}-{max(numbers)}-{count}",
                link=reverse("jobs"),
            )
            continue
        for job in jobs:
            row = Job.of(job)
            notify(
                owner,
                lambda row=row: (
                    _("Your job %(number)s (%(name)s) has ended: %(state)s. %(why)s")
                    % {
                        "number": row.id,
                        "name": row.name,
                        "state": row.state_label,
                        "why": translated(row.explanation),
                    }
                ),
                Kind.JOB_OVER,
                key=f"job:{job.id}:{job.submitted}",
                link=row.get_absolute_url(),
            )


def _notify_of_arrays(arrays: Iterable[tuple[str, int | None]]) -> None:
    """Notify owners of arrays whose last task has ended, once and not of each task."""
    for user, array_id in arrays:
        rows = Job.objects.filter(user=user, array_id=array_id)
        owner = User.objects.filter(username=user).first()
        if owner is None or rows.filter(active=True).exists():
            continue
        last = rows.order_by("id").first()
        failed = rows.exclude(state__in=(JobState.COMPLETED, JobState.CANCELLED)).count()
        if last is None:
            continue
        array = {"number": array_id, "name": last.name, "failed": failed}
        notify(
            owner,
            lambda array=array: (
                _("All tasks of your array %(number)s (%(name)s) have ended.") % array
                if not array["failed"]
                else ngettext(
                    "All tasks of your array %(number)s (%(name)s) have ended; %(failed)d of them failed.",
                    "All tasks of your array %(number)s (%(name)s) have ended; %(failed)d of them failed.",
                    array["failed"],
                )
                % array
            ),
            Kind.JOB_OVER,
            key=f"array:{array_id}:{last.submitted}",
            link=reverse("job", args=[last.id]),
        )


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
            reported = broker.job(row.id, user=row.user)
            ended = _ending([reported])
            Job.store([reported])
            _notify_ended(ended)
        except NotFound:
            row.state = JobState.UNKNOWN
            row.explanation = message("Slurm no longer knows how this job ended.")
            row.active = False
            row.save()
