"""Planning maintenance and cancelling it: the row first, then the reservation; and whom it concerns."""

import logging
from collections.abc import Iterable
from datetime import datetime

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.bookings import BookingState
from carme.bookings.reconcile import is_maintenance, shifted
from carme.broker import BrokerClient
from carme.errors import BrokerUnavailable, CarmeError, InvalidRequest, SlurmError
from carme.jobs import Job
from carme.jobs.nodes import expand
from carme.wording import listing
from carme_webui.accounts.models import User
from carme_webui.announcements.models import Maintenance, News
from carme_webui.bookings.models import Booking
from carme_webui.notifier import notifier
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify

__all__ = [
    "bookings_within",
    "cancel",
    "delete",
    "overlapping_jobs",
    "plan",
    "publish",
    "reconcile",
    "reserve",
]

logger = logging.getLogger(__name__)


def publish(row: News) -> None:
    """Publish it; open pages show it at once."""
    row.save()
    notifier.notify_all()


def delete(row: News) -> None:
    """Withdraw it."""
    row.delete()
    notifier.notify_all()


def plan(
    row: Maintenance, by: User, wanted: Iterable[str], broker: BrokerClient, before: Maintenance | None = None
) -> None:
    """Make or change a maintenance.

    Args:
        row: With all but its nodes; saved when it can be had.
        wanted: Its nodes; none: all that there are.
        before: What it was, when it is changed.

    Raises:
        InvalidRequest: There is no such node, the time is over, or ends before it begins.
        CarmeError: The cluster cannot be seen, or Slurm refuses; then it stays what it was.
    """
    if row.end <= row.start:
        raise InvalidRequest(_("It must end after it begins."), field="end")
    known = [node.name for node in broker.cluster().nodes]
    names = list(dict.fromkeys(wanted))
    if strange := [name for name in names if name not in known]:
        raise InvalidRequest(
            _("There is no node %r.") % strange[0][:40],
            _("There are: %s.") % listing(known),
            field="nodes",
        )
    if row.end <= timezone.now():
        raise InvalidRequest(_("This time is over."), _("Choose a later end."), field="end")
    row.node_names, row.whole, row.by = names or known, not names, by
    row.reserved, row.problem = None, ""
    row.save()
    try:
        reserve(row, broker, by.username)
    except CarmeError:
        if before is None:
            row.delete()
        else:
            before.save()
        raise
    warn(row, broker)
    notifier.notify_all()


def reserve(row: Maintenance, broker: BrokerClient, by: str) -> None:
    """Reserve the nodes in Slurm. When nobody answers, the reconciler does it later.

    Raises:
        CarmeError: Slurm or the broker refuses.
    """
    try:
        broker.maintain(row.window, user=by)
    except CarmeError as error:
        Maintenance.objects.filter(pk=row.pk).update(reserved=None, problem=error.text)
        away = isinstance(error, SlurmError) and error.code == "slurm-away"
        if not (away or isinstance(error, BrokerUnavailable)):
            raise
        logger.warning("The nodes of the maintenance %s are reserved later: %s", row.name, error)
    else:
        Maintenance.objects.filter(pk=row.pk).update(reserved=row.reserved or timezone.now(), problem="")
    row.refresh_from_db()


def cancel(row: Maintenance, by: User, broker: BrokerClient) -> bool:
    """Do not do it, or end it now.

    Returns:
        Whether Slurm has freed its nodes. When Slurm cannot be queried, the reconciler does that later.
    """
    row.cancelled = timezone.now()
    row.reserved, row.problem = None, ""
    row.save()
    try:
        broker.release(row.name, user=by.username)
    except CarmeError as error:
        logger.warning("The reservation of the maintenance %s is deleted later: %s", row.name, error)
        freed = False
    else:
        freed = True
    notifier.notify_all()
    return freed


def bookings_within(row: Maintenance) -> list[Booking]:
    """Bookings of its nodes at its time."""
    rows = Booking.open().filter(start__lt=row.end, end__gt=row.start)
    return [each for each in rows if set(each.node_names) & set(row.node_names)]


def overlapping_jobs(row: Maintenance, jobs: Iterable[Job]) -> list[Job]:
    """Jobs that run on its nodes and may still do so when it begins."""
    nodes = set(row.node_names)
    return [
        job
        for job in jobs
        if job.is_running
        and job.started is not None
        and (job.ends is None or job.ends > row.start)
        and nodes & set(expand(job.node_list))
    ]


def warn(row: Maintenance, broker: BrokerClient) -> None:
    """Notify those whom it concerns, once for each time that it is planned for."""
    event = f"maintenance:{row.name}:{row.start:%Y%m%d%H%M}-{row.end:%Y%m%d%H%M}"
    for each in bookings_within(row):
        notify(
            each.owner,
            lambda each=each: _concerns(each) % {"title": row.title, "when": row.span, "what": each.heading},
            Kind.MAINTENANCE,
            key=f"{event}:{each.name[6:]}",
            link=each.get_absolute_url(),
        )
    try:
        running = overlapping_jobs(row, broker.jobs())
    except CarmeError as error:
        logger.warning("Whose jobs run into the maintenance %s is not known: %s", row.name, error)
        return
    owners = {job.user for job in running}
    for user in User.objects.filter(username__in=owners):
        notify(
            user,
            lambda: (
                _(
                    "“%(title)s”, %(when)s: a job of yours may still run then, and may be ended. Save its "
                    "results before."
                )
                % {"title": row.title, "when": row.span}
            ),
            Kind.MAINTENANCE,
            key=f"{event}:jobs",
            link=row.get_absolute_url(),
        )


def _concerns(booking: Booking) -> str:
    if booking.state == BookingState.REQUESTED:
        return _(
            "“%(title)s”, %(when)s, concerns your booking “%(what)s”: it waits for approval, and may be "
            "refused."
        )
    return _(
        "“%(title)s”, %(when)s, concerns your booking “%(what)s”: if other nodes are free it moves there, "
        "and you get a notification."
    )


def reconcile(broker: BrokerClient, now: datetime | None = None) -> bool:
    """Make rows and Slurm's reservations agree, whatever was away in between; two rounds at once do no harm.

    Returns:
        Whether Slurm could be seen. If not, nothing was done.
    """
    now = now or timezone.now()
    try:
        # Before the rows are read: each is written before its reservation is made.
        there = {
            reservation.name: reservation
            for reservation in broker.reservations()
            if is_maintenance(reservation.name)
        }
    except CarmeError as error:
        logger.warning("Maintenance and Slurm's reservations are compared later: %s", error)
        return False
    planned = {row.name: row for row in Maintenance.planned(now).select_related("by")}
    for row in planned.values():
        if row.name not in there or shifted(row.window, there[row.name], now):
            try:
                reserve(row, broker, row.by.username if row.by else "root")
            except CarmeError as error:
                logger.warning("Slurm does not reserve the nodes of the maintenance %s: %s", row.name, error)
        elif row.reserved is None or row.problem:
            Maintenance.objects.filter(pk=row.pk).update(reserved=now, problem="")
        warn(row, broker)
    # Where there is no row at all another database has them, as on a new head before its backup is restored.
    unknown = there.keys() - planned.keys() if Maintenance.objects.exists() else set[str]()
    for name in unknown:
        if Maintenance.planned(now).filter(name=name).exists():
            continue
        try:
            broker.release(name, user="root")
        except CarmeError as error:
            logger.warning("The reservation %s is deleted later: %s", name, error)
    return True
