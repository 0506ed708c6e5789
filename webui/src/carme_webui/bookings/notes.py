"""Notices about bookings."""

from collections.abc import Callable, Iterable

from django.utils.translation import gettext as _

from carme.translation import translated
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify_all

__all__ = ["begun", "decided", "ended", "moved", "not_staged", "requested", "trouble"]


def _say(booking: Booking, users: Iterable[User], kind: Kind, text: Callable[[], str], key: str = "") -> None:
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


def requested(booking: Booking) -> None:
    """It waits for a manager."""
    managers = User.objects.filter(is_staff=True, is_active=True)
    _say(booking, managers, Kind.APPROVAL, lambda: _("%(who)s asks to book “%(what)s”, %(when)s."))


def decided(booking: Booking, words: str = "") -> None:
    """A manager approved or refused, perhaps with a note."""
    besides = f" {words}".replace("%", "%%") if words else ""

    def text() -> str:
        if booking.is_over:
            return _("Your booking “%(what)s”, %(when)s, is refused.") + besides
        return _("Your booking “%(what)s”, %(when)s, is approved.") + besides

    _say(booking, [booking.owner], Kind.BOOKING_DECIDED, text)


def begun(booking: Booking) -> None:
    """Its time has come."""
    people = booking.people()
    _say(
        *(booking, people, Kind.BOOKING_BEGINS),
        *(lambda: _("The booking “%(what)s” has begun: %(nodes)s, %(when)s."), "begun"),
    )


def ended(booking: Booking) -> None:
    """It is over for a reason that its owner may not know of."""
    _say(
        *(booking, [booking.owner], Kind.BOOKING_ENDED),
        *(lambda: _("Your booking “%(what)s”, %(when)s, is over: %(how)s."), "ended"),
    )


def moved(booking: Booking, maintained: bool) -> None:
    """It is on other nodes than before."""

    def text() -> str:
        if maintained:
            return _("The booking “%(what)s”, %(when)s, is now on %(nodes)s, because of maintenance.")
        return _("The booking “%(what)s”, %(when)s, is now on %(nodes)s, because a node does not work.")

    _say(booking, booking.people(), Kind.BOOKING_PROBLEM, text)


def not_staged(booking: Booking) -> None:
    """The data of its session could not be brought ahead."""

    def text() -> str:
        why = translated(booking.stage_problem).replace("%", "%%")
        return (
            _("The data of your booking “%(what)s”, %(when)s, is not there yet.")
            + f" {why} "
            + _("The session copies it when it starts, which uses booked time.")
        )

    _say(booking, [booking.owner], Kind.BOOKING_PROBLEM, text, f"not staged {booking.stage_name[-8:]}")


def trouble(booking: Booking) -> None:
    """It cannot be had as it was booked."""
    _say(
        *(booking, [booking.owner], Kind.BOOKING_PROBLEM),
        lambda: _("Your booking “%(what)s”, %(when)s: %(problem)s"),
    )
