"""Times as people write and read them, in the site's zone. Everything else is in UTC."""

from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from carme.errors import InvalidRequest
from carme.translation import message as _

__all__ = ["day_bounds", "from_local", "moment_text", "span_text"]


def from_local(local: datetime, zone: ZoneInfo) -> datetime:
    """The moment in UTC at which the zone's clocks show a time.

    A time that comes twice, when clocks go back, is the first one.

    Raises:
        InvalidRequest: Clocks go forward and never show that time.
    """
    aware = local.replace(tzinfo=zone, fold=0)
    moment = aware.astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) != local.replace(fold=0):
        later = moment.astimezone(zone)
        raise InvalidRequest(
            _(
                "There is no {time} on {day}, because the clocks go forward then.",
                time=f"{local:%H:%M}",
                day=_day(local.date()),
            ),
            _("Choose {time}, which is the same moment, or another time.", time=f"{later:%H:%M}"),
            field="start",
        )
    return moment


def day_bounds(day: date, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """The moments in UTC at which a day begins and the next one does: 23, 24 or 25 hours apart."""
    return _midnight(day, zone), _midnight(day + timedelta(days=1), zone)


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    # Where clocks skip midnight itself, the day begins with the first time that they show.
    return datetime.combine(day, time(), tzinfo=zone).astimezone(UTC)


def moment_text(moment: datetime, zone: ZoneInfo) -> str:
    """`Mon 2 Nov, 14:30`; where clocks show that time twice, with the zone's name for it."""
    local = moment.astimezone(zone)
    twice = local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset()
    return f"{_day(local.date())}, {local:%H:%M}{f' {local:%Z}' if twice else ''}"


def span_text(start: datetime, end: datetime, zone: ZoneInfo) -> str:
    """`Mon 2 Nov, 14:30 to 16:30`, or with the day of the end where that is another one."""
    same_day = start.astimezone(zone).date() == end.astimezone(zone).date()
    until = moment_text(end, zone)
    return _(
        "{start} to {end}",
        start=moment_text(start, zone),
        end=until.partition(", ")[2] if same_day else until,
    )


def _day(day: date) -> str:
    return f"{day:%a} {day.day} {day:%b}"
