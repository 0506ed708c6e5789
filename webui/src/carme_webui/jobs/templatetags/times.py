"""Moments on pages, in the reader's time zone: `times.js` takes the browser's zone or the chosen one.

Without JavaScript they have the name of their zone; on hover they are by the site's clocks.
"""

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from django import template
from django.contrib.humanize.templatetags.humanize import naturaltime
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString

from carme_webui.clocks import reader_zone, site_zone, span_words

__all__ = ["moment", "register", "site_time", "span"]

register = template.Library()

#: How a moment may be written; `ago` is how long ago it is, or how soon.
STYLES = {
    "clock": "H:i",
    "seconds": "H:i:s",
    "short": "j M, H:i",
    "long": "j M Y, H:i:s",
    "minutes": "j M Y, H:i",
    "day": "j M Y",
    "ago": "",
}


@register.filter
def moment(value: datetime | None, style: str = "short") -> SafeString | str:
    """A moment in one of STYLES, with the site's time on hover; empty for none."""
    if value is None or value == "":
        return ""
    local = value.astimezone(reader_zone())
    if style == "ago":
        words = str(naturaltime(value))
    else:
        words = date_format(local, STYLES[style]) + ("" if style == "day" else f" {local:%Z}")
    return format_html(
        '<time datetime="{}" data-style="{}" title="{}">{}</time>',
        _stamp(value),
        style,
        site_time(value),
        words,
    )


@register.filter
def site_time(value: datetime) -> str:
    """A moment by the site's clocks, with their zone, as it is shown on hover."""
    there = value.astimezone(site_zone())
    return f"{date_format(there, STYLES['long'])} {there:%Z}"


@register.filter
def span(value: Any) -> SafeString:
    """From when to when something is that has a start and an end."""
    words, full = (_span_in(value, zone) for zone in (reader_zone(), site_zone()))
    return format_html(
        '<time datetime="{}" data-style="span" data-end="{}" title="{}">{}</time>',
        *(_stamp(value.start), _stamp(value.end), full, words),
    )


def _span_in(value: Any, zone: ZoneInfo) -> str:
    words = span_words(value.start, value.end, zone)
    named = f"({zone.key})"
    return words if words.endswith(named) else f"{words} {named}"  # the site's is not named by itself


def _stamp(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
