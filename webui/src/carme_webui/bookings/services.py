"""Booking, changing, deleting and deciding: the rules, the row, and the reservation, in this order.

The row is written first, then the request is sent to Slurm. If Slurm refuses, the row becomes what it was; if
it cannot be reached just now, the row stays and the reconciler sends the request.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from carme.bookings import (
    BookingRequest,
    BookingState,
    Cause,
    Claim,
    Standing,
    board_of,
    check_rules,
    choose_nodes,
    needs_approval,
)
from carme.bookings.claims import of_jobs, of_reservations
from carme.bookings.policy import nearest_starts
from carme.bookings.reconcile import is_ours
from carme.broker import BrokerClient
from carme.config import BookingSettings, Settings
from carme.errors import BrokerUnavailable, CarmeError, InvalidRequest, SlurmError
from carme.images import ImageCatalogue
from carme.jobs import Cluster, Job, Reservation, SessionOptions, Stage
from carme.jobs.access import partition_refusal
from carme.translation import joined, message, translated
from carme.wording import decimal, listing
from carme_webui.accounts.models import User
from carme_webui.announcements.models import Maintenance
from carme_webui.bookings import notes
from carme_webui.bookings.models import Booking, Calendar
from carme_webui.clocks import reader_zone, site_zone
from carme_webui.projects.models import Project, access_for, projects_of, usable_by

__all__ = [
    "accept",
    "approve",
    "book",
    "change",
    "claims",
    "decline",
    "delete",
    "deny",
    "free_starts",
    "offer",
    "plan_session",
    "release",
    "reserve",
]  # fmt: skip

logger = logging.getLogger(__name__)


def _away(error: CarmeError) -> bool:
    """Whether nobody could say yes or no."""
    return isinstance(error, BrokerUnavailable) or (
        isinstance(error, SlurmError) and error.code == "slurm-away"
    )


@contextmanager
def _readers_clocks() -> Iterator[ZoneInfo]:
    """The zone of times in a refusal, which names it where it is not the site's."""
    zone = reader_zone()
    try:
        yield zone
    except InvalidRequest as error:
        if error.field != "start" or zone.key == site_zone().key:
            raise
        named = message("Times are in {zone}.", zone=zone.key)
        raise InvalidRequest(error.message, joined([error.remedy, named]), field=error.field) from None


def claims(
    jobs: Iterable[Job], reservations: Iterable[Reservation], without: Booking | None = None
) -> list[Claim]:
    """Who has which node when.

    Args:
        jobs, reservations: As Slurm knows them.
        without: The booking that looks for nodes, with what is kept for it and the jobs in it.
    """
    own = without.name if without else ""
    reservations = list(reservations)
    planned = [
        Claim(node, row.start, row.end)
        for row in Maintenance.planned(timezone.now())
        for node in row.node_names
    ]
    return [
        *_booked(row for row in Booking.open() if row.name != own),
        *planned,
        *of_reservations(reservation for reservation in reservations if not is_ours(reservation.name)),
        *of_jobs((job for job in jobs if job.reservation != own or not own), reservations),
    ]


def book(owner: User, proposed: BookingRequest, site: Settings, broker: BrokerClient) -> Booking:
    """Make a booking.

    Raises:
        InvalidRequest: The site's rules or what others have forbid it; the error says what can be had.
        CarmeError: The cluster cannot be seen, or Slurm refuses.
    """
    _check_users(proposed, owner)
    project = _project(proposed, owner)
    policy = _rules(site, proposed.partition, project)
    cluster, jobs, reservations = _cluster_state(broker)
    _check_access(proposed, owner, project, cluster)
    now = timezone.now()
    with _readers_clocks() as zone, transaction.atomic():
        Calendar.lock()
        check_budget(project, proposed)
        standing = _standing(owner, project, site, proposed.partition, now)
        check_rules(proposed, policy, standing, now, zone)
        board = board_of(
            *(proposed.partition, proposed.gpu_type, proposed.gpus_per_node),
            *(cluster, claims(jobs, reservations), policy, *_own_share(project, site)),
        )
        nodes = choose_nodes(proposed, board, policy, now, zone)
        booking = Booking(owner=owner, project=project, state=_first_state(proposed, owner, policy))
        booking.take(proposed, nodes)
        booking.save()
    if booking.state == BookingState.APPROVED:
        try:
            reserve(booking, broker)
        except CarmeError:
            booking.delete()
            raise
    else:
        notes.notify_of_request(booking)
    return booking


def change(booking: Booking, proposed: BookingRequest, site: Settings, broker: BrokerClient) -> None:
    """Make a booking another one: other nodes, another time, other users.

    Raises:
        InvalidRequest, CarmeError: As `book` does; then it stays what it was.
    """
    policy = _rules(site, proposed.partition, booking.project)
    _check_users(proposed, booking.owner)
    cluster, jobs, reservations = _cluster_state(broker)
    _check_access(proposed, booking.owner, booking.project, cluster)
    now = timezone.now()
    with _readers_clocks() as zone, transaction.atomic():
        Calendar.lock()
        booking.refresh_from_db()
        _require_open(booking)
        before = Booking.objects.get(pk=booking.pk)
        if booking.state == BookingState.ACTIVE and proposed.start != booking.start:
            raise InvalidRequest(
                message("The booking has begun, so its start cannot change any more."),
                message("Change its length, or delete it and book anew."),
                field="start",
            )
        if proposed.end <= now:
            raise InvalidRequest(
                _("The booking would be over already."),
                _("Choose a longer time, or delete the booking."),
                field="minutes",
            )
        if proposed.project != (booking.project.name if booking.project else ""):
            raise InvalidRequest(
                _("You cannot change who a booking is for."),
                _("Delete it and book anew, or hand it over."),
                field="project",
            )
        check_budget(booking.project, proposed, booking)
        standing = _standing(booking.owner, booking.project, site, proposed.partition, now, booking)
        check_rules(proposed, policy, standing, now, zone)
        board = board_of(
            *(proposed.partition, proposed.gpu_type, proposed.gpus_per_node),
            *(cluster, claims(jobs, reservations, booking), policy),
            *_own_share(booking.project, site, booking),
        )
        nodes = choose_nodes(proposed, board, policy, now, zone, prefer=booking.node_names)
        larger = proposed.gpu_hours > before.proposed.gpu_hours
        booking.take(proposed, nodes)
        if larger and booking.state == BookingState.APPROVED:
            booking.state = _first_state(proposed, booking.owner, policy)
        booking.problem = ""
        booking.save()
    try:
        if booking.state == BookingState.REQUESTED:
            release(booking, broker)
            notes.notify_of_request(booking)
        else:
            reserve(booking, broker)
    except CarmeError:
        before.save()
        raise


def delete(booking: Booking, broker: BrokerClient) -> bool:
    """End a booking now; whether its nodes are free already. Raises InvalidRequest when it is over."""
    if not booking.move(Cause.CANCELLED):
        _require_open(booking)
    return release(booking, broker)


def plan_session(
    booking: Booking,
    image: str,
    images: ImageCatalogue,
    stage: Sequence[Stage] = (),
    results: str | None = None,
) -> None:
    """Have a session start in its first minute, with all that is booked; without an image none.

    Args:
        stage: What is brought to its nodes before the booking begins (`carme_webui.bookings.data`).
        results: Where what it leaves goes.

    Raises:
        InvalidRequest: There is no such image, the booking is over, or its session has been started.
    """
    if image:
        try:
            images.get(image)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, error.remedy, field="session_image") from None
    if image:  # the same sentences as where a session is started
        SessionOptions.read({"image": image, "minutes": 1, "stage": list(stage), "results": results or None})
    planned = {
        "session_image": image,
        "session_stage": [each.model_dump() for each in stage] if image else [],
        "session_results": (results or "") if image else "",
    }
    changed = booking.alter(Booking.open().filter(session_name=""), **planned)
    if not changed and booking.session_image != image:
        _require_open(booking)
        raise InvalidRequest(
            _("The session of this booking has been started already."),
            _("Stop it on its own page, or start another one in the booking."),
            field="session_image",
        )


def offer(booking: Booking, username: str) -> None:
    """Let another user take it over; without a name nobody any more.

    Raises:
        InvalidRequest: There is no such other user, or the booking is over.
    """
    taker = User.objects.filter(username=username, is_active=True).first() if username else None
    if username and (taker is None or taker == booking.owner):
        raise InvalidRequest(
            _("There is no other user %r here.") % username[:40],
            _("Enter that user's sign-in name."),
            field="user",
        )
    if not booking.alter(Booking.open(), offered_to=taker):
        _require_open(booking)


def accept(booking: Booking, user: User, site: Settings, broker: BrokerClient) -> None:
    """Become the owner of a booking that was offered to this user; it counts as theirs from then on.

    Raises:
        InvalidRequest: It is not offered to them (any more), or is more than they may have booked.
        CarmeError: Slurm refuses; then it stays what it was.
    """
    policy = _rules(site, booking.partition, booking.project)
    now = timezone.now()
    with _readers_clocks() as zone, transaction.atomic():
        Calendar.lock()
        booking.refresh_from_db()
        _require_open(booking)
        if booking.offered_to != user:
            raise InvalidRequest(
                _("This booking is not offered to you (any more)."), _("Ask its owner to offer it again.")
            )
        if booking.project_id is not None and booking.project_id not in projects_of(user):
            raise InvalidRequest(
                _("This booking is for a project that you are not in."),
                _("Ask a manager of the project to invite you."),
            )
        before = Booking.objects.get(pk=booking.pk)
        standing = _standing(user, booking.project, site, booking.partition, now, booking)
        check_rules(booking.proposed, policy, standing, now, zone)
        booking.owner, booking.offered_to = user, None
        booking.users = [name for name in booking.users if name != user.username]
        if not booking.session_name:
            # Its start was the former owner's choice.
            booking.session_image, booking.session_stage, booking.session_results = "", [], ""
        booking.save()
    if booking.state == BookingState.REQUESTED:
        return
    try:
        reserve(booking, broker)
    except CarmeError:
        before.save()
        booking.refresh_from_db()
        raise


def decline(booking: Booking, user: User) -> None:
    """Do not take over what was offered to this user."""
    booking.alter(Booking.objects.filter(offered_to=user), offered_to=None)


def approve(booking: Booking, broker: BrokerClient, words: str = "") -> None:
    """Say yes for a manager.

    Args:
        words: What the notice to the owner says besides.

    Raises:
        InvalidRequest: It does not wait for an approval.
        CarmeError: Slurm cannot keep it; then it goes on waiting.
    """
    if not booking.move(BookingState.APPROVED):
        raise InvalidRequest(
            _("This booking does not wait for approval (any more)."), _("Load the calendar again.")
        )
    try:
        reserve(booking, broker)
    except CarmeError:
        booking.move(BookingState.REQUESTED)
        raise
    notes.notify_of_decision(booking, words)


def deny(booking: Booking, words: str = "") -> None:
    """Say no for a manager. Raises InvalidRequest as `approve` does."""
    if not booking.move(Cause.DENIED):
        raise InvalidRequest(
            _("This booking does not wait for approval (any more)."), _("Load the calendar again.")
        )
    notes.notify_of_decision(booking, words)


def reserve(booking: Booking, broker: BrokerClient) -> None:
    """Reserve the nodes in Slurm. When nobody answers, the reconciler does it later.

    Raises:
        CarmeError: Slurm or the broker refuses.
    """
    try:
        broker.reserve(booking.reservation_spec, user=booking.owner.username)
    except CarmeError as error:
        Booking.objects.filter(pk=booking.pk).update(reserved=None, problem=error.text)
        if not _away(error):
            raise
        logger.warning("The nodes of booking %s are reserved later: %s", booking.name, error)
    else:
        saved = booking.reserved or timezone.now()
        Booking.objects.filter(pk=booking.pk).update(reserved=saved, problem="")
    booking.refresh_from_db()


def release(booking: Booking, broker: BrokerClient) -> bool:
    """Delete the reservation in Slurm; whether that is done. When it fails, the reconciler does it later."""
    Booking.objects.filter(pk=booking.pk).update(reserved=None)
    booking.refresh_from_db()
    try:
        broker.release(booking.name, user=booking.owner.username)
    except CarmeError as error:
        logger.warning("The reservation of booking %s is deleted later: %s", booking.name, error)
        return False
    return True


def free_starts(
    proposed: BookingRequest, site: Settings, broker: BrokerClient, booking: Booking | None = None
) -> list[datetime]:
    """The nearest starts at which the request could be met.

    Raises:
        InvalidRequest: There are no such nodes.
        CarmeError: The cluster cannot be seen.
    """
    project = Project.objects.filter(name=proposed.project, closed=None).first() if proposed.project else None
    policy = _rules(site, proposed.partition, project)
    cluster, jobs, reservations = _cluster_state(broker)
    board = board_of(
        *(proposed.partition, proposed.gpu_type, proposed.gpus_per_node),
        *(cluster, claims(jobs, reservations, booking), policy, *_own_share(project, site, booking)),
    )
    return nearest_starts(proposed, board, policy, timezone.now())


def _cluster_state(broker: BrokerClient) -> tuple[Cluster, list[Job], list[Reservation]]:
    return broker.cluster(), broker.jobs(), broker.reservations()


def _check_access(proposed: BookingRequest, owner: User, project: Project | None, cluster: Cluster) -> None:
    """Check that Slurm accepts jobs of the booking's owner in its partition.

    Raises:
        InvalidRequest: With the partitions that do.
    """
    partition = next((each for each in cluster.partitions if each.name == proposed.partition), None)
    if partition is None:
        return  # the board says so
    # Slurm does not ask who books: what the owner may use is not to be an answer of a moment ago.
    access = access_for(owner, anew=True)
    if project is None:
        known = usable_by(owner, cluster)
        if known is not None and partition in known.partitions:
            return
    account = project.account if project else settings.SITE.slurm.default_account
    refusal = partition_refusal(partition, access, account, None, cluster.partitions)
    if refusal is not None:
        raise refusal


def _standing(
    owner: User,
    project: Project | None,
    site: Settings,
    partition: str,
    now: datetime,
    changed: Booking | None = None,
) -> Standing:
    """What counts against the rules: what the owner has booked, or the project where it has rules."""
    policy = _rules(site, partition, project)
    own = site.project_bookings(project.name) if project else None
    since = now - timedelta(days=policy.budget_days)
    booked = Booking.objects.filter(partition=partition, end__gt=since)
    booked = booked.exclude(pk=changed.pk) if changed else booked
    # What is booked for a project is that project's.
    hours = booked.filter(project=project) if project else booked.filter(owner=owner, project=None)
    counts_project = own is not None and own.at_a_time is not None
    many = booked.filter(project=project) if counts_project else booked.filter(owner=owner)
    return Standing(
        open=sum(not row.is_over for row in many),
        gpu_hours=sum(row.gpu_hours for row in hours),
        ahead=changed.start if changed else None,
        project=project.name if project and counts_project else "",
    )


def _project(proposed: BookingRequest, owner: User) -> Project | None:
    """The project that is booked for. Raises InvalidRequest when the owner is not in it."""
    if not proposed.project:
        return None
    found = Project.of(owner).filter(name=proposed.project).first()
    if found is None:
        raise InvalidRequest(
            _("You are in no open project %r.") % proposed.project,
            _("Choose one of yours, or none."),
            field="project",
        )
    return found


def _rules(site: Settings, partition: str, project: Project | None) -> BookingSettings:
    """The rules for what is booked: a project has GPU-hours of its own, where it has any."""
    if project is None:
        return site.booking_policy(partition)
    policy = site.booking_policy(partition, project.name)
    hours = site.project_bookings(project.name).gpu_hours
    return policy.model_copy(update={"gpu_hours": hours or 0})


def _own_share(
    project: Project | None, site: Settings, without: Booking | None = None
) -> tuple[list[Claim], int | None]:
    """What a project has booked apart from one booking, and its share of the system in percent."""
    percent = site.project_bookings(project.name).share_percent if project else None
    if percent is None:
        return [], None
    rows = Booking.open().filter(project=project)
    rows = rows.exclude(pk=without.pk) if without else rows
    return _booked(rows), percent


def _booked(rows: Iterable[Booking]) -> list[Claim]:
    return [Claim(node, row.start, row.end, row.gpus_per_node) for row in rows for node in row.node_names]


def check_budget(project: Project | None, proposed: BookingRequest, changed: Booking | None = None) -> None:
    """See that a project may use what is booked for it, and has enough GPU-hours.

    Raises:
        InvalidRequest: With the field, and what the project may book.
    """
    if project is None:
        return
    if project.partitions and proposed.partition not in project.partitions:
        raise InvalidRequest(
            _("The project %(project)s may not use the partition %(partition)s; it may use: %(all)s.")
            % {"project": project.name, "partition": proposed.partition, "all": listing(project.partitions)},
            _("Choose one of these."),
            field="partition",
        )
    limits = [
        ("nodes", proposed.nodes, project.nodes),
        ("gpus_per_node", proposed.gpus, project.gpus),
        ("gpus_per_node", proposed.gpus, project.gpu_types.get(proposed.gpu_type)),
        ("minutes", proposed.minutes, project.minutes),
    ]
    for field, requested, most in limits:
        if most is not None and requested > most:
            words = {"nodes": _("nodes"), "gpus_per_node": _("GPUs"), "minutes": _("minutes")}[field]
            raise InvalidRequest(
                _("The project %(project)s may have %(most)d %(what)s at most; %(requested)d were requested.")
                % {"project": project.name, "most": most, "what": words, "requested": requested},
                _("Ask for less, or ask an administrator for more."),
                field=field,
            )
    if project.gpu_hours is None:
        return
    booked = project.booked - (changed.gpu_hours_left if changed else 0.0)
    left = max(0.0, project.gpu_hours - project.use.gpu_hours - booked)
    if proposed.gpu_hours > left:
        raise InvalidRequest(
            _(
                "The booking costs %(cost)s GPU-hours; of the %(all)d of the project %(project)s, "
                "%(left)s are neither used nor booked."
            )
            % {
                "cost": translated(decimal(proposed.gpu_hours)),
                "all": project.gpu_hours,
                "project": project.name,
                "left": translated(decimal(left)),
            },
            _("Book fewer GPUs or less time."),
            field="minutes",
        )


def _first_state(proposed: BookingRequest, owner: User, policy: BookingSettings) -> BookingState:
    """What managers book needs nobody's approval."""
    requests = needs_approval(proposed, policy) and not owner.is_staff
    return BookingState.REQUESTED if requests else BookingState.APPROVED


def _check_users(proposed: BookingRequest, owner: User) -> None:
    known = set(User.objects.filter(username__in=proposed.users).values_list("username", flat=True))
    if strange := sorted(set(proposed.users) - known):
        raise InvalidRequest(
            _("There is no user %r here.") % strange[0],
            _("Enter sign-in names, separated by commas."),
            field="users",
        )


def _require_open(booking: Booking) -> None:
    if booking.is_over:
        raise InvalidRequest(_("This booking is over."), _("Make a new booking."))
