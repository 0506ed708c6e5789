"""Notices about bookings."""

from collections.abc import Callable, Iterable

from django.utils.translation import gettext as _

from carme.translation import translated
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify_all

__all__ = [
    "notify_of_begin",
    "notify_of_decision",
    "notify_of_end",
    "notify_of_missing_data",
    "notify_of_move",
    "notify_of_problem",
    "notify_of_request",
]


def _notify(
    booking: Booking, users: Iterable[User], kind: Kind, text: Callable[[], str], key: str = ""
) -> None:
    """Notify users. The sentence may name what, who, when, nodes, problem and how.

    Args:
        key: What happened, if each booking's people are notified once only.
    """

    def words() -> str:
        return text() % {
            "what": booking.heading,
            "who": booking.owner.username,
            "when": booking.span,
            "nodes": ", ".join(booking.node_names),
            "problem": translated(booking.problem),
            "how": booking.label,
        }

    event = f"{key}:{booking.name}" if key else None
    notify_all(users, words, kind, key=event, link=booking.get_absolute_url())


def notify_of_request(booking: Booking) -> None:
    """It waits for a manager."""
    managers = User.objects.filter(is_staff=True, is_active=True)
    _notify(booking, managers, Kind.APPROVAL, lambda: _("%(who)s asks to book “%(what)s”, %(when)s."))


def notify_of_decision(booking: Booking, words: str = "") -> None:
    """A manager approved or refused, perhaps with a note."""
    besides = f" {words}".replace("%", "%%") if words else ""

    def text() -> str:
        if booking.is_over:
            return _("Your booking “%(what)s”, %(when)s, is refused.") + besides
        return _("Your booking “%(what)s”, %(when)s, is approved.") + besides

    _notify(booking, [booking.owner], Kind.BOOKING_DECIDED, text)


def notify_of_begin(booking: Booking) -> None:
    """Its time has come."""
    people = booking.people()
    _notify(
        *(booking, people, Kind.BOOKING_BEGINS),
        *(lambda: _("The booking “%(what)s” has begun: %(nodes)s, %(when)s."), "begun"),
    )


def notify_of_end(booking: Booking) -> None:
    """It is over for a reason that its owner may not know of."""
    _notify(
        *(booking, [booking.owner], Kind.BOOKING_ENDED),
        *(lambda: _("Your booking “%(what)s”, %(when)s, is over: %(how)s."), "ended"),
    )


def notify_of_move(booking: Booking, maintained: bool) -> None:
    """It is on other nodes than before."""

    def text() -> str:
        if maintained:
            return _("The booking “%(what)s”, %(when)s, is now on %(nodes)s, because of maintenance.")
        return _("The booking “%(what)s”, %(when)s, is now on %(nodes)s, because a node does not work.")

    _notify(booking, booking.people(), Kind.BOOKING_PROBLEM, text)


def notify_of_missing_data(booking: Booking) -> None:
    """The data of its session could not be brought ahead."""

    def text() -> str:
        why = translated(booking.stage_problem).replace("%", "%%")
        return (
            _("The data of your booking “%(what)s”, %(when)s, is not there yet.")
            + f" {why} "
            + _("The session copies it when it starts, which uses booked time.")
        )

    _notify(booking, [booking.owner], Kind.BOOKING_PROBLEM, text, f"not staged {booking.stage_name[-8:]}")


def notify_of_problem(booking: Booking) -> None:
    """It cannot be had as it was booked."""
    _notify(
        *(booking, [booking.owner], Kind.BOOKING_PROBLEM),
        lambda: _("Your booking “%(what)s”, %(when)s: %(problem)s"),
    )
