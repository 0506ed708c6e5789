"""The coming days of the GPUs as the dashboard shows them: a small calendar for each type."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.template.loader import render_to_string
from django.utils.formats import date_format
from django.utils.html import escape
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from carme.jobs import Forecast, GpuForecast
from carme_webui.caches import cache_key, cached
from carme_webui.clocks import reader_zone, span_words
from carme_webui.cluster import Supply
from carme_webui.jobs.templatetags.times import moment

__all__ = ["Block", "Day", "Shown", "shown"]

#: Hours of a block of the calendar, which is as long as people plan.
BLOCK_HOURS = 3
#: For how long a calendar of the same content is cached.
CALENDAR_SECONDS = 60
#: Shades of blocks.
LEVELS = 4


@dataclass(frozen=True)
class Block:
    """Some hours of a day.

    Attributes:
        free: How many are free throughout what is still to come of it; None: it is over, or too far away.
        level: The same as a shade, 0 to LEVELS.
        words: The same in words.
        stop: 0 for the block that the tab key stops at, -1 for those that arrow keys lead to.
    """

    free: int | None = None
    level: int = 0
    words: str = ""
    stop: int = -1


@dataclass(frozen=True)
class Day:
    """A day by the reader's clocks, with its blocks."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Shown:
    """GPUs of one type.

    Attributes:
        queued: GPUs that waiting jobs have requested.
        calendar: The coming days as HTML; empty if unknown.
        words: The same in words.
    """

    supply: Supply
    queued: int = 0
    calendar: SafeString | str = ""
    words: str = ""

    @property
    def used(self) -> int:
        """What is neither free nor out of service cannot be distinguished by users: it is in use."""
        return self.supply.total - self.supply.free


def shown(supplies: Sequence[Supply], plan: Forecast | None) -> list[Shown]:
    """Each type with its plan, where there is one."""
    kinds = {kind.gpu_type: kind for kind in plan.kinds} if plan else {}
    found = []
    for supply in supplies:
        kind = kinds.get(supply.kind)
        if plan is None or kind is None or not kind.free:
            found.append(Shown(supply))
        else:
            calendar = _calendar(supply, kind, plan)
            found.append(Shown(supply, kind.queued, calendar, _words(kind, plan, supply.free)))
    return found


def _calendar(supply: Supply, kind: GpuForecast, plan: Forecast) -> SafeString:
    """The table of the coming days, which is the same for all readers of a language and a zone."""
    key = cache_key("free-days", reader_zone().key, repr(supply), repr(kind), plan.start, plan.step_minutes)
    return cached("pages", key, lambda: _make_calendar(supply, kind, plan), CALENDAR_SECONDS)


def _make_calendar(supply: Supply, kind: GpuForecast, plan: Forecast) -> SafeString:
    context = {
        "supply": supply,
        "days": _days(kind, plan),
        "hours": range(0, 24, BLOCK_HOURS),
        "zone": reader_zone().key,
    }
    return render_to_string("sessions/free_days.html", context)


def _days(kind: GpuForecast, plan: Forecast) -> list[Day]:
    zone, step = reader_zone(), timedelta(minutes=plan.step_minutes)
    free: dict[tuple[datetime, int], list[int]] = {}
    for place, count in enumerate(kind.free):
        local = (plan.start + place * step).astimezone(zone)
        day = local.replace(hour=0, minute=0, second=0, microsecond=0)
        free.setdefault((day, local.hour // BLOCK_HOURS), []).append(count)
    days = sorted({day for day, _block in free}, key=lambda day: day.date())
    first = min(free)
    return [
        Day(
            date_format(day, _("D j")),
            [
                _block(day, number, free.get((day, number)), kind.total, 0 if (day, number) == first else -1)
                for number in range(24 // BLOCK_HOURS)
            ],
        )
        for day in days
    ]


def _block(day: datetime, number: int, counts: list[int] | None, total: int, stop: int) -> Block:
    if not counts:
        return Block()
    least = min(counts)
    start = day.replace(hour=number * BLOCK_HOURS)
    words = {
        "span": span_words(start, start + timedelta(hours=BLOCK_HOURS), reader_zone()),
        "free": least,
        "total": total,
    }
    level = -(-least * LEVELS // max(1, total))
    return Block(least, level, _("%(span)s: %(free)d of %(total)d free") % words, stop)


def _words(kind: GpuForecast, plan: Forecast, free: int) -> str:
    """When more of them will be free than now; else that it stays so. For a page, with the moment as HTML.

    Args:
        free: How many are free at this moment: some of them may be spoken for within the first step.
    """
    now, most = kind.free[0], max(kind.free)
    place = kind.free.index(most)
    when = moment(plan.start + place * timedelta(minutes=plan.step_minutes))
    if most > max(now, free):
        words = _("Slurm expects %(count)s to be free from %(when)s.")
        return SafeString(escape(words) % {"count": most, "when": when})
    if now < free and place:
        reported = {"taken": free - now, "count": most, "when": when}
        words = _("Slurm plans to use %(taken)s of them soon. %(count)s will be free again from %(when)s.")
        return SafeString(escape(words) % reported)
    if now < free:
        return _("Slurm plans to use %(taken)s of them soon.") % {"taken": free - now}
    if free == kind.total:
        return _("All GPUs are free.")
    return _("No more are expected within three days.")
