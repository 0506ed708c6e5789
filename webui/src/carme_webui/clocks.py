"""Moments in words, in the site's time zone or the reader's."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from zoneinfo import ZoneInfo

from django.conf import settings
from django.utils.formats import date_format
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from carme.bookings.clock import moment_text, span_text
from carme.jobs import minutes_text
from carme.translation import translated

__all__ = ["in_zone", "minutes_words", "reader_zone", "short_words", "site_zone", "span_words"]

#: Seconds of a minute, and minutes of a day.
_MINUTE, _DAY_MINUTES = 60, 1440
_reader: ContextVar[ZoneInfo | None] = ContextVar("reader_zone", default=None)


def site_zone() -> ZoneInfo:
    """The zone of the site's clocks."""
    return ZoneInfo(settings.SITE.site.time_zone)


def reader_zone() -> ZoneInfo:
    """The zone of the reader of the page or mail that is made; the site's where that is not known."""
    return _reader.get() or site_zone()


@contextmanager
def in_zone(zone: ZoneInfo | None) -> Iterator[None]:
    """Make something for a reader in a zone; None: the site's."""
    token = _reader.set(zone)
    try:
        yield
    finally:
        _reader.reset(token)


def minutes_words(minutes: int) -> str:
    """A time in minutes in the reader's language: `1 hour 30 minutes`."""
    return translated(minutes_text(minutes))


def short_words(seconds: float) -> str:
    """A length of time in at most two units, on one line: `40 s`, `15 min`, `1 h 15 min`, `2 d 3 h`."""
    whole, minutes, hours = (max(1, round(seconds / unit)) for unit in (1, 60, 3600))
    if whole < _MINUTE:
        parts = [_("%s s") % whole]
    elif minutes < _DAY_MINUTES:
        parts = [_("%s h") % (minutes // 60)] if minutes >= 60 else []
        parts += [_("%s min") % (minutes % 60)] if minutes % 60 else []
    else:
        parts = [_("%s d") % (hours // 24), *([_("%s h") % (hours % 24)] if hours % 24 else [])]
    return " ".join(parts).replace(" ", "\xa0")


def span_words(start: datetime, end: datetime, zone: ZoneInfo | None = None) -> str:
    """From when to when in the reader's language, by the site's clocks or those of a zone.

    A zone that is not the site's is named.
    """
    shown = zone or site_zone()
    named = f" ({shown.key})" if shown.key != site_zone().key else ""
    if (get_language() or "en").startswith("en"):
        return span_text(start, end, shown) + named
    last = end.astimezone(shown)
    same_day = start.astimezone(shown).date() == last.date()
    until = date_format(last, "H:i") + _twice(last) if same_day else _moment_words(end, shown)
    return _("%(first)s to %(last)s") % {"first": _moment_words(start, shown), "last": until} + named


def _moment_words(moment: datetime, zone: ZoneInfo | None = None) -> str:
    """A moment in the reader's language, by the site's clocks or those of a zone."""
    zone = zone or site_zone()
    if (get_language() or "en").startswith("en"):
        return moment_text(moment, zone)
    local = moment.astimezone(zone)
    return date_format(local, _("D j M, H:i")) + _twice(local)


def _twice(local: datetime) -> str:
    """The zone's name where clocks show a time twice."""
    return f" {local:%Z}" if local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset() else ""
