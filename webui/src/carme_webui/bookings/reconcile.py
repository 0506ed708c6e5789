"""Reconciles bookings with Slurm's reservations, whatever was away in between.

Each round works out the changes anew; two rounds at once do no harm. Slurm is read before the rows are: a row
is written before its reservation is made, so that every reservation that was seen and has no row is one that
nobody wants.
"""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from carme.bookings import BookingState, Cause, board_of
from carme.bookings.reconcile import is_ours, plan
from carme.bookings.slots import Need
from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme.jobs import Cluster, Job, Reservation, SessionOptions
from carme.translation import message
from carme_webui.accounts.language import language_of
from carme_webui.bookings import data, notes
from carme_webui.bookings.models import Booking, Calendar
from carme_webui.bookings.services import claims, release, reserve
from carme_webui.sessions.models import Session, new_name

__all__ = ["reconcile"]

logger = logging.getLogger(__name__)


def reconcile(broker: BrokerClient, now: datetime | None = None) -> bool:
    """One round.

    Args:
        now: The time; the present one by default.

    Returns:
        Whether Slurm could be seen. If not, only what the clock says was done.
    """
    now = now or timezone.now()
    _let_time_pass(now)
    try:
        # Jobs may have come and gone since the last round: Slurm remembers them for some minutes.
        cluster, jobs, reservations = broker.cluster(), broker.jobs(active=False), broker.reservations()
    except CarmeError as error:
        logger.warning("Bookings and Slurm's reservations are compared later: %s", error)
        return False
    _note_use(jobs, now)
    data.bring(broker, jobs, now)
    _begin_sessions(cluster, now)
    _give_back_unused(broker, now)
    _agree(broker, reservations, now)
    _leave_bad_nodes(broker, cluster, jobs, reservations, now)
    return True


def _let_time_pass(now: datetime) -> None:
    """Begin and end what the clock begins and ends."""
    for row in Booking.open().filter(state=BookingState.REQUESTED, start__lte=now):
        if row.move(Cause.UNANSWERED):
            notes.notify_of_end(row)
    for row in Booking.open().filter(end__lte=now):
        if row.reserved:
            row.move(Cause.FINISHED, ended=row.end)
        elif row.move(Cause.IMPOSSIBLE, ended=row.start):  # so it costs nothing
            notes.notify_of_end(row)
    for row in Booking.open().filter(state=BookingState.APPROVED, start__lte=now):
        if row.move(BookingState.ACTIVE):
            notes.notify_of_begin(row)


def _begin_sessions(cluster: Cluster, now: datetime) -> None:
    """Start the sessions that were planned for bookings which have begun; the portal then asks the hub."""
    begun = Booking.open().filter(state=BookingState.ACTIVE, reserved__isnull=False, end__gt=now)
    for row in begun.exclude(session_image=""):
        # The name is decided once, so that two rounds, or one after a crash, make one session.
        Booking.objects.filter(pk=row.pk, session_name="").update(session_name=new_name())
        row.refresh_from_db()
        if Session.objects.filter(name=row.session_name).exists():
            continue
        longest = [
            (row.end - max(row.start, now)) // timedelta(minutes=1),
            settings.SITE.session_policy(row.partition).maximum_minutes,
            *(
                partition.max_minutes
                for partition in cluster.partitions
                if partition.name == row.partition and partition.max_minutes
            ),
        ]
        options = SessionOptions(
            image=row.session_image,
            title=row.title,
            partition=row.partition,
            gpu_type=row.gpu_type,
            gpus_per_node=row.gpus_per_node,
            nodes=len(row.node_names),
            minutes=max(1, min(longest)),
            account=row.project.account if row.project else None,
            reservation=row.name,
            stage=data.stages_of(row),
            results=row.session_results or None,
        )
        Session.request(row.owner, options, row.session_name, language_of(row.owner))
        Booking.objects.filter(pk=row.pk).update(used=now)
        logger.info("Booking %s has begun: its session %s is started.", row.name, row.session_name)


def _note_use(jobs: Iterable[Job], now: datetime) -> None:
    """Remember in which bookings there are or were jobs; one that waits for them counts as well."""
    names = {job.reservation for job in jobs if (job.is_active or job.started) and is_ours(job.reservation)}
    Booking.objects.filter(name__in=names).update(used=now)


def _give_back_unused(broker: BrokerClient, now: datetime) -> None:
    """End bookings in which nobody ran anything; what is left of them is credited."""
    for row in Booking.open().filter(state=BookingState.ACTIVE, used=None, reserved__isnull=False):
        grace = timedelta(minutes=row.policy(settings.SITE).grace_minutes)
        # While Slurm did not keep it, nobody could have used it.
        if grace and now >= max(row.start, row.reserved or now) + grace and row.move(Cause.UNUSED, ended=now):
            logger.info("Booking %s is given back: nothing ran in it.", row.name)
            release(row, broker)
            notes.notify_of_end(row)


def _leave_bad_nodes(
    broker: BrokerClient,
    cluster: Cluster,
    jobs: list[Job],
    reservations: list[Reservation],
    now: datetime,
) -> None:
    """Put bookings whose nodes have failed, or are to be maintained, onto others where there are any."""
    failed = {node.name for node in cluster.nodes if not node.available}
    known = {node.name for node in cluster.nodes}
    foreign = [reservation for reservation in reservations if not is_ours(reservation.name)]
    busy = {job.reservation for job in jobs if job.is_active and not job.is_pending}
    for row in Booking.open().exclude(state=BookingState.REQUESTED):
        maintained = {
            node
            for each in foreign
            if each.start < row.end and each.end > max(row.start, now)
            for node in each.node_names
        }
        bad = sorted(set(row.node_names) & (failed | maintained) | set(row.node_names) - known)
        if not bad:
            # They work again, or the maintenance was cancelled.
            Booking.objects.filter(pk=row.pk, reserved__isnull=False).exclude(problem="").update(problem="")
            continue
        # A node that fails long before may well be back in time.
        if not set(bad) & maintained and row.start > now + timedelta(hours=1):
            continue
        if row.name not in busy and _move(row, bad, cluster, jobs, reservations, now):
            row.refresh_from_db()
            _try(row, broker)
            if not row.is_over:
                notes.notify_of_move(row, maintained=set(bad) <= maintained)
            continue
        problem = message(
            "The node {node} {why}, and no other one is free for the whole time.",
            node=bad[0],
            why=message("is to be maintained then") if set(bad) <= maintained else message("does not work"),
        )
        if Booking.objects.filter(pk=row.pk).exclude(problem=problem).update(problem=problem):
            row.problem = problem
            notes.notify_of_problem(row)


def _move(
    row: Booking,
    bad: list[str],
    cluster: Cluster,
    jobs: list[Job],
    reservations: list[Reservation],
    now: datetime,
) -> bool:
    policy = row.policy(settings.SITE)
    with transaction.atomic():
        Calendar.lock()
        row.refresh_from_db()
        if row.is_over:
            return True
        try:
            board = board_of(
                *(row.partition, row.gpu_type, row.gpus_per_node),
                *(cluster, claims(jobs, reservations, row), policy.model_copy(update={"share_percent": 100})),
            )
        except CarmeError:
            return False
        start = max(row.start, now)
        need = Need(len(row.node_names), row.gpus_per_node, row.end - start)
        nodes = board.place(need, start, prefer=set(row.node_names) - set(bad))
        if nodes is None:
            return False
        logger.info("Booking %s leaves %s and is now on %s.", row.name, bad, nodes)
        row.alter(Booking.open(), node_names=nodes, problem="")
    return True


def _agree(broker: BrokerClient, reservations: list[Reservation], now: datetime) -> None:
    rows = {row.name: row for row in Booking.open().exclude(state=BookingState.REQUESTED)}
    todo = plan((row.reservation_spec for row in rows.values()), reservations, now)
    changed = {spec.name for spec in todo.keep}
    agreeing = Booking.objects.filter(name__in=rows.keys() - changed, reserved=None)
    agreeing.update(reserved=now)
    # Where there is no row at all another database has them, as on a new head before its backup is restored.
    for name in todo.release if Booking.objects.exists() else ():
        row = Booking.objects.select_related("owner").filter(name=name).first()
        if row is not None:
            row.refresh_from_db()
            if row.state in (BookingState.APPROVED, BookingState.ACTIVE):
                continue  # approved since
        try:
            broker.release(name, user=row.owner.username if row else "root")
        except CarmeError as error:
            logger.warning("The reservation %s is deleted later: %s", name, error)
    for spec in todo.keep:
        row = rows[spec.name]
        row.refresh_from_db()  # its owner may have changed or deleted it by now
        _try(row, broker)


def _try(row: Booking, broker: BrokerClient) -> None:
    """Reserve in Slurm what a booking holds now, if it still holds anything."""
    if row.state not in (BookingState.APPROVED, BookingState.ACTIVE) or row.end <= timezone.now():
        return
    try:
        reserve(row, broker)
    except CarmeError as error:
        logger.warning("Slurm does not reserve the nodes of booking %s: %s", row.name, error)
