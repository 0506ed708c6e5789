"""Kinds of notices, and whether users want them on pages and by mail."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from carme_webui.accounts.models import User

__all__ = ["ABOUT", "About", "Kind", "choices_of", "choose", "wants"]


class Kind(StrEnum):
    """What a notice is about."""

    ACCOUNT = "account"
    MAINTENANCE = "maintenance"
    SESSION_READY = "session-ready"
    SESSION_ENDS = "session-ends"
    SESSION_OVER = "session-over"
    JOB_OVER = "job-over"
    JOB_WARNED = "job-warned"
    BOOKING_DECIDED = "booking-decided"
    BOOKING_BEGINS = "booking-begins"
    BOOKING_ENDED = "booking-ended"
    BOOKING_PROBLEM = "booking-problem"
    APPROVAL = "approval"
    PROJECT = "project"
    QUOTA = "quota"


class About(NamedTuple):
    """A kind in words, and what holds unless a user says otherwise.

    Attributes:
        fixed: Nobody can do without it on pages.
        managers: Only administrators get such notices.
    """

    title: Promise
    page: bool
    mail: bool
    fixed: bool = False
    managers: bool = False


ABOUT: dict[Kind, About] = {
    Kind.ACCOUNT: About(_("My account, and what administrators do to my jobs"), True, True, fixed=True),
    Kind.MAINTENANCE: About(_("Maintenance that concerns me"), True, True, fixed=True),
    Kind.SESSION_READY: About(_("A session is ready"), False, False),
    Kind.SESSION_ENDS: About(_("A session is about to end"), True, False),
    Kind.SESSION_OVER: About(_("A session has failed"), True, False),
    Kind.JOB_OVER: About(_("A batch job has ended"), False, False),
    Kind.JOB_WARNED: About(_("A job or session of mine does not use what it holds"), True, True),
    Kind.BOOKING_DECIDED: About(_("A booking is approved or refused"), True, True),
    Kind.BOOKING_BEGINS: About(_("A booking begins"), True, False),
    Kind.BOOKING_ENDED: About(_("A booking is given back, or nobody approved it"), True, True),
    Kind.BOOKING_PROBLEM: About(_("A booking moves to other nodes, or has a problem"), True, True),
    Kind.APPROVAL: About(_("A booking waits for approval"), True, False, managers=True),
    Kind.PROJECT: About(_("Invitations to projects"), True, True),
    Kind.QUOTA: About(_("A project of mine has nearly used up its GPU-hours"), True, True),
}


def wants(user: User, kind: Kind) -> tuple[bool, bool]:
    """Whether this user wants such notices on pages, and by mail."""
    about = ABOUT[kind]
    page, mail = user.wanted.get(kind, (about.page, about.mail))
    return page or about.fixed, mail


def choices_of(user: User) -> list[tuple[Kind, About, bool, bool]]:
    """All notices that this user can get, with what is wanted of each: (kind, about, on pages, by mail)."""
    return [
        (kind, about, *wants(user, kind))
        for kind, about in ABOUT.items()
        if user.is_staff or not about.managers
    ]


def choose(user: User, requested: Mapping[Kind, tuple[bool, bool]]) -> None:
    """Store which notices this user wants, on pages and by mail; of what is not named nothing is wanted."""
    chosen: dict[str, list[bool]] = {}
    for kind, about, *_now in choices_of(user):
        page, mail = requested.get(kind, (False, False))
        how = [page or about.fixed, mail]
        # What is as the site has it follows the site when that changes.
        if how != [about.page, about.mail]:
            chosen[kind] = how
    user.wanted = chosen
    user.save(update_fields=["wanted"])
