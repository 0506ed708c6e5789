"""Moments in words by the site's clocks."""

from datetime import datetime
from zoneinfo import ZoneInfo

from django.conf import settings
from django.utils.formats import date_format
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from carme.bookings.clock import moment_text, span_text

__all__ = ["moment_words", "site_zone", "span_words"]


def site_zone() -> ZoneInfo:
    """The zone of the site's clocks."""
    return ZoneInfo(settings.SITE.site.time_zone)


def span_words(start: datetime, end: datetime) -> str:
    """From when to when by the site's clocks, in the reader's language."""
    zone = site_zone()
    if (get_language() or "en").startswith("en"):
        return span_text(start, end, zone)
    last = end.astimezone(zone)
    same_day = start.astimezone(zone).date() == last.date()
    until = date_format(last, "H:i") + _twice(last) if same_day else moment_words(end)
    return _("%(first)s to %(last)s") % {"first": moment_words(start), "last": until}


def moment_words(moment: datetime) -> str:
    """A moment by the site's clocks, in the reader's language."""
    if (get_language() or "en").startswith("en"):
        return moment_text(moment, site_zone())
    local = moment.astimezone(site_zone())
    return date_format(local, _("D j M, H:i")) + _twice(local)


def _twice(local: datetime) -> str:
    """The zone's name where clocks show a time twice."""
    return f" {local:%Z}" if local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset() else ""
