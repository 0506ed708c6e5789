"""What an owner does with a session, from a page or through the API: the same checks and the same words."""

import re
from collections.abc import Sequence
from datetime import timedelta

from django.conf import settings
from django.utils import timezone
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.config import Settings
from carme.errors import InvalidRequest
from carme.images import ImageCatalogue
from carme.jobs import Access, Cluster, SessionOptions, check, minutes_text, partition_of
from carme.projects import ACCOUNT_PATTERN
from carme.sessions import Extension, SessionState
from carme.translation import message
from carme.wording import listing, number
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.cluster import entry_points
from carme_webui.notifier import notifier
from carme_webui.projects.models import Project
from carme_webui.projects.rules import check_project
from carme_webui.sessions.clock import check_extension
from carme_webui.sessions.lifecycle import tend_soon
from carme_webui.sessions.models import Preset, Session
from carme_webui.titles import tidy

__all__ = ["check_options", "extend", "minutes_in", "save_preset", "start", "stop"]

MOST_PRESETS = 30


def check_options(
    options: SessionOptions,
    cluster: Cluster,
    catalogue: ImageCatalogue,
    site: Settings,
    bookings: Sequence[Booking],
    projects: Sequence[Project],
    access: Access | None = None,
) -> None:
    """See that these options can be had.

    Args:
        bookings: Those that the owner may use.
        projects: Those that the owner is in; other accounts are Slurm's to allow.
        access: What Slurm lets the owner use; None: that is not known.

    Raises:
        InvalidRequest: With the field, and what can be had.
        CarmeError: The image cannot be read.
    """
    check(options, cluster, catalogue, site, access)
    apps = entry_points(catalogue.get(options.image))
    if options.app not in apps:
        raise InvalidRequest(
            message(
                "The image {image!r} has no app {app!r}; it has: {apps}.",
                image=options.image,
                app=options.app,
                apps=listing(apps),
            ),
            message("Choose one of these."),
            field="app",
        )
    if options.account is not None and re.fullmatch(ACCOUNT_PATTERN, options.account):
        _check_project(options, partition_of(options, cluster, site).name, projects)
    if options.reservation is not None:
        _check_booking(options, partition_of(options, cluster, site).name, bookings)


def _check_project(options: SessionOptions, partition: str, projects: Sequence[Project]) -> None:
    project = next((row for row in projects if row.account == options.account), None)
    if project is None:
        raise InvalidRequest(
            message("You are not in this project (any more), or it is closed."),
            message("Choose another one, or none."),
            field="account",
        )
    check_project(options, project, partition)


def _check_booking(options: SessionOptions, partition: str, bookings: Sequence[Booking]) -> None:
    """More nodes than the booking has would wait for ever, and more time than it has would be cut off."""
    row = next((row for row in bookings if row.name == options.reservation), None)
    if row is not None and row.project is not None and options.account != row.project.account:
        raise InvalidRequest(
            message("This booking is for the project {project}.", project=row.project.title),
            message("Choose that project as well."),
            field="account",
        )
    if row is None:
        raise InvalidRequest(
            message("This booking is over, or you may not use it."),
            message("Choose another one, or none."),
            field="reservation",
        )
    if partition != row.partition:
        raise InvalidRequest(
            message(
                "The booking is in partition {booked!r}, not in {partition!r}.",
                booked=row.partition,
                partition=partition,
            ),
            message("Choose its partition, or no booking."),
            field="partition",
        )
    if options.nodes > len(row.node_names):
        raise InvalidRequest(
            message(
                "The booking has {nodes}; {wanted} were requested.",
                nodes=number(len(row.node_names), "node"),
                wanted=options.nodes,
            ),
            message("Ask for {count} or fewer.", count=len(row.node_names)),
            field="nodes",
        )
    if options.minutes > minutes_in(row):
        raise InvalidRequest(
            message(
                "The booking lasts {left} more; {wanted} were requested.",
                left=minutes_text(minutes_in(row)),
                wanted=minutes_text(options.minutes),
            ),
            message("Ask for at most {minutes}.", minutes=number(minutes_in(row), "minute")),
            field="minutes",
        )


def minutes_in(booking: Booking) -> int:
    """The longest session that still fits."""
    return max(0, (booking.end - max(booking.start, timezone.now())) // timedelta(minutes=1))


def start(owner: User, options: SessionOptions, name: str) -> tuple[Session, bool]:
    """Make the session and request it from the hub; whether it was made now, not by an earlier request."""
    found, created = Session.request(owner, options, name, owner.language or get_language() or "")
    if created:
        tend_soon()
        notifier.notify([owner.username])
    return found, created


def save_preset(owner: User, name: str, options: SessionOptions) -> Preset:
    """Remember options that were checked; those of the same name are replaced.

    Raises:
        InvalidRequest: The name has something invisible, or there are too many.
    """
    name = tidy(name)
    if Preset.objects.filter(owner=owner).exclude(name=name).count() >= MOST_PRESETS:
        raise InvalidRequest(_("You have %s presets already. Delete one first.") % MOST_PRESETS)
    # A booking is over one day, and a preset is for ever.
    values = options.model_copy(update={"reservation": None}).model_dump()
    return Preset.objects.update_or_create(owner=owner, name=name, defaults={"options": values})[0]


def stop(found: Session) -> None:
    """Have a session stopped; one that is over or stopping stays as it is."""
    if found.move(SessionState.STOPPING, sentence="", requested_at=None):
        notifier.notify([found.owner.username])
        tend_soon()


def extend(found: Session, minutes: int, broker: BrokerClient) -> Extension:
    """Give a session more time.

    Raises:
        InvalidRequest: It does not run, or so much time cannot be had.
        CarmeError: The broker or Slurm refuses.
    """
    reported = found.last_reported
    if reported is None or found.is_over:
        raise InvalidRequest(_("This session does not run."), _("Start it again instead."))
    check_extension(minutes, settings.SITE.session_policy(reported.partition).maximum_minutes)
    given = broker.extend(reported.job_id, minutes, user=found.owner.username)
    found.follow(reported.model_copy(update={"ends": given.ends}))
    notifier.notify([found.owner.username])
    return given
