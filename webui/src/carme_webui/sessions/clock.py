"""How long a session still lasts, and when its owner is warned."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.translation import gettext as _

from carme.errors import InvalidRequest
from carme.sessions import Session, SessionState, Step, level_of
from carme_webui.clocks import minutes_words

__all__ = ["Remaining", "check_extension", "extensions", "minutes_of_form", "remaining"]

# Minutes that pages offer to add.
EXTENSIONS = (15, 30, 60, 120, 240)
DIGITS = 9


@dataclass(frozen=True)
class Remaining:
    """The time until a session is ended.

    Attributes:
        ends: When.
        left: Until then; never less than nothing.
        whole: From the start of its job until then; None when the start is not known.
        idle: It ends because nothing runs in it, unless that changes.
    """

    ends: datetime
    left: timedelta
    whole: timedelta | None = None
    idle: bool = False

    @property
    def minutes(self) -> int:
        """The minutes left, the one that runs included."""
        return -int(-self.left.total_seconds() // 60)

    @property
    def words(self) -> str:
        """The time left: `1 hour 12 minutes`."""
        return minutes_words(self.minutes) if self.minutes > 1 else _("less than a minute")

    @property
    def level(self) -> str:
        """How near the end is: empty, `near` or `urgent`."""
        return level_of(self.left, self.whole)

    @property
    def percent(self) -> int:
        """The part of the whole time that is left."""
        return round(100 * self.left / self.whole) if self.whole else 0


def remaining(session: Session, now: datetime) -> list[Remaining]:
    """What will end a session that runs, the nearest first: its time limit, and its being idle."""
    if session.state not in (SessionState.STARTING, SessionState.READY, SessionState.LOST):
        return []
    found = []
    if session.ends is not None:
        start = session.at(Step.ALLOCATED)
        whole = session.ends - start if start else None
        found.append(Remaining(session.ends, max(session.ends - now, timedelta()), whole))
    if session.stops_idle is not None:
        found.append(Remaining(session.stops_idle, max(session.stops_idle - now, timedelta()), idle=True))
    return sorted(found, key=lambda end: end.ends)


def extensions() -> list[tuple[int, str]]:
    """The minutes that pages offer to add to what runs, with their words."""
    return [(minutes, minutes_words(minutes)) for minutes in EXTENSIONS]


def minutes_of_form(given: str) -> int:
    """The minutes of a form that asks for more time; 0 for what is not a number."""
    return int(given) if given.isascii() and given.isdigit() and len(given) <= DIGITS else 0


def check_extension(minutes: int, most: int) -> None:
    """See that so much time may be requested.

    Raises:
        InvalidRequest: It is none, or more than `most`.
    """
    if not 1 <= minutes <= most:
        raise InvalidRequest(
            _("The time to add must be a number of minutes from 1 to %s.") % most,
            _("Choose one of the list."),
            field="minutes",
        )
