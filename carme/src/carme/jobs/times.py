"""Lengths of time as people write them."""

import re
from datetime import datetime

from carme.errors import InvalidRequest
from carme.translation import message as _
from carme.translation import moment, plural
from carme.wording import number

_UNITS = {"m": 1, "h": 60, "d": 1440}
_PARTS = re.compile(r"(\d+)([mhd])")


def parse_minutes(text: str) -> int:
    """Minutes of `90`, `45m`, `2h`, `1d12h` or `[DAYS-]HOURS:MINUTES:SECONDS`; seconds are rounded up.

    Raises:
        InvalidRequest: The text is none of these, or is not a time at all.
    """
    text = text.strip().lower()
    minutes = 0
    if re.fullmatch(r"\d{1,9}", text, re.ASCII):
        minutes = int(text)
    elif re.fullmatch(r"(\d{1,9}[mhd])+", text, re.ASCII):
        minutes = sum(int(count) * _UNITS[unit] for count, unit in _PARTS.findall(text))
    elif match := re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6}):([0-5]\d):([0-5]\d)", text, re.ASCII):
        days, hours, mins, seconds = (int(part or 0) for part in match.groups())
        minutes = days * 1440 + hours * 60 + mins + (seconds > 0)
    if minutes < 1:
        raise InvalidRequest(
            _("{text!r} is not a length of time.", text=text),
            _("Write minutes like 90, or 45m, 2h, 1d12h, or hours, minutes and seconds like 1:30:00."),
            field="minutes",
        )
    return minutes


def minutes_text(minutes: int) -> str:
    """`45 minutes`, `2 hours`, `1 day 12 hours`."""
    days, rest = divmod(minutes, 1440)
    hours, mins = divmod(rest, 60)
    found = number(mins, "minute") if mins or not (days or hours) else ""
    if hours and found:
        found = plural("{count} hour {rest}", "{count} hours {rest}", hours, rest=found)
    elif hours:
        found = number(hours, "hour")
    if days and found:
        return plural("{count} day {rest}", "{count} days {rest}", days, rest=found)
    return number(days, "day") if days else found


def moment_text(when: datetime, now: datetime) -> str:
    """A time of day by this host's zone, with the date if it is another day's; pages show the reader's."""
    local = when.astimezone()
    day = "" if local.date() == now.astimezone().date() else "%Y-%m-%d "
    return moment(local.strftime(f"{day}%H:%M %Z"), when)
