"""What a project's jobs used, by member and month."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import pairwise

from django.core.cache import cache
from django.db.models import Q
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from carme_webui.accounts.models import User
from carme_webui.clocks import site_zone
from carme_webui.jobs.models import Job
from carme_webui.jobs.month import LONGEST_WAIT
from carme_webui.metrics.charts import Part, Stack
from carme_webui.projects.models import Project

__all__ = ["MONTHS", "use_by_month"]

#: Months that are shown, the one that runs included.
MONTHS = 6
#: Members with a colour of their own; the others are one part.
MOST_MEMBERS = 6
#: Seconds for which a project's sums of the month that runs are remembered, and those of the months before.
REMEMBERED, REMEMBERED_PAST = 300, 86_400
HOUR = timedelta(hours=1)

#: Hours by the month's place and the user.
_Hours = dict[tuple[int, str], float]
#: User, GPUs, processors, start and end of a job.
_Row = tuple[str, int, int, datetime, datetime | None]


def use_by_month(project: Project, reader: User, names_all: bool) -> Stack | None:
    """GPU-hours of a project's jobs by member and month; CPU-hours if no job had a GPU.

    Args:
        reader: Whose own part is shown by name.
        names_all: Whether the reader may see who of the others used how much: a manager may. Others see the
            project's total.

    Returns:
        None if no job of the project has run in these months.
    """
    now = timezone.now()
    starts = _months(now)
    past = _remembered(project, starts, REMEMBERED_PAST, 0)
    latest = _remembered(project, [starts[-1], now], REMEMBERED, MONTHS - 1)
    gpu, cpu = (old | new for old, new in zip(past, latest, strict=True))
    hours, unit = (gpu, _("GPU-hours")) if any(gpu.values()) else (cpu, _("CPU-hours"))
    totals: dict[str, float] = defaultdict(float)
    for (_place, user), value in hours.items():
        totals[user] += value
    ranked = sorted((user for user, total in totals.items() if total), key=lambda user: -totals[user])
    if not ranked:
        return None
    named = ranked[:MOST_MEMBERS] if names_all else [reader.username]
    parts = [Part(user, _monthly_hours(hours, [user])) for user in named]
    unnamed = [user for user in ranked if user not in named]
    if not names_all:
        parts.append(Part(_("the project's total"), _monthly_hours(hours, ranked), total=True))
    elif unnamed:
        parts.append(Part(_("other members"), _monthly_hours(hours, unnamed), rest=True))
    labels = [date_format(start, "M Y") for start in starts]
    return Stack(_("Use by member and month"), unit, _("Month"), labels, parts)


def _monthly_hours(hours: _Hours, users: Iterable[str]) -> list[float]:
    """What these users used in each month."""
    chosen = list(users)
    return [round(sum(hours.get((place, user), 0.0) for user in chosen), 1) for place in range(MONTHS)]


def _months(now: datetime) -> list[datetime]:
    """When each month began by the site's clocks, the one that runs last."""
    start = now.astimezone(site_zone()).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    found = [start]
    while len(found) < MONTHS:
        start = (start - timedelta(days=1)).replace(day=1)
        found.insert(0, start)
    return found


def _remembered(project: Project, bounds: list[datetime], seconds: int, place: int) -> tuple[_Hours, _Hours]:
    """GPU-hours and CPU-hours between these moments, by month (that of the first is `place`) and user.

    All jobs of a project in half a year are many, and what ran in past months changes no more.
    """
    key = f"project-use-{project.pk}-{place}-{bounds[0]:%Y-%m}"
    known: tuple[_Hours, _Hours] | None = cache.get(key)
    if known is None:
        known = _sums(_rows(project, bounds[0], bounds[-1]), bounds, place)
        cache.set(key, known, seconds)
    return known


def _rows(project: Project, since: datetime, until: datetime) -> Iterator[_Row]:
    """The jobs that ran between these moments."""
    rows = Job.objects.filter(account=project.account, submitted__gte=since - LONGEST_WAIT)
    ran = rows.filter(Q(ended__gt=since) | Q(ended=None, active=True), started__lt=until)
    return ran.values_list("user", "gpus", "cpus", "started", "ended").iterator(2000)


def _sums(rows: Iterable[_Row], bounds: list[datetime], place: int) -> tuple[_Hours, _Hours]:
    """GPU-hours and CPU-hours by month and user."""
    gpu: _Hours = defaultdict(float)
    cpu: _Hours = defaultdict(float)
    for user, gpus, cpus, started, ended in rows:
        for month, (start, end) in enumerate(pairwise(bounds), place):
            first, last = max(started, start), min(ended or end, end)
            if last > first:
                hours = (last - first) / HOUR
                gpu[month, user] += gpus * hours
                cpu[month, user] += cpus * hours
    return dict(gpu), dict(cpu)
