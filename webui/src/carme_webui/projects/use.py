"""What a project's jobs used, by member and month."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

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
#: Seconds for which a project's sums are remembered.
REMEMBERED = 300
HOUR = timedelta(hours=1)

#: Hours by the month's place and the user.
_Hours = dict[tuple[int, str], float]
#: User, GPUs, processors, start and end of a job.
_Row = tuple[str, int, int, datetime, datetime | None]


def use_by_month(project: Project, reader: User, names_all: bool) -> Stack | None:
    """GPU-hours of a project's jobs by member and month; CPU-hours if no job had a GPU.

    Args:
        reader: Whose own part is shown by name, if there is one.
        names_all: Whether the reader may see who of the others used how much: a manager may.

    Returns:
        None if no job of the project has run in these months.
    """
    now = timezone.now()
    starts = _months(now)
    key = f"project-use-{project.pk}-{starts[-1]:%Y-%m}"
    known: tuple[_Hours, _Hours] | None = cache.get(key)
    if known is None:
        known = _sums(_rows(project, starts[0]), starts, now)
        cache.set(key, known, REMEMBERED)
    gpu, cpu = known
    hours, unit = (gpu, _("GPU-hours")) if any(gpu.values()) else (cpu, _("CPU-hours"))
    totals: dict[str, float] = defaultdict(float)
    for (_place, user), value in hours.items():
        totals[user] += value
    ranked = sorted((user for user, total in totals.items() if total), key=lambda user: -totals[user])
    if not ranked:
        return None
    named = ranked[:MOST_MEMBERS] if names_all else [user for user in ranked if user == reader.username]
    parts = [Part(user, _of(hours, [user])) for user in named]
    if others := [user for user in ranked if user not in named]:
        parts.append(Part(_("other members"), _of(hours, others), rest=True))
    labels = [date_format(start, "M Y") for start in starts]
    return Stack(_("Use by member and month"), unit, _("Month"), labels, parts)


def _of(hours: _Hours, users: Iterable[str]) -> list[float]:
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


def _rows(project: Project, since: datetime) -> Iterator[_Row]:
    """The jobs that ran since then."""
    rows = Job.objects.filter(account=project.account, submitted__gte=since - LONGEST_WAIT)
    ran = rows.filter(Q(ended__gt=since) | Q(ended=None, active=True), started__isnull=False)
    return ran.values_list("user", "gpus", "cpus", "started", "ended").iterator(2000)


def _sums(rows: Iterable[_Row], starts: list[datetime], now: datetime) -> tuple[_Hours, _Hours]:
    """GPU-hours and CPU-hours by month and user."""
    gpu: _Hours = defaultdict(float)
    cpu: _Hours = defaultdict(float)
    bounds = [*starts, now]
    for user, gpus, cpus, started, ended in rows:
        for place in range(MONTHS):
            first, last = max(started, bounds[place]), min(ended or now, bounds[place + 1])
            if last > first:
                hours = (last - first) / HOUR
                gpu[place, user] += gpus * hours
                cpu[place, user] += cpus * hours
    return dict(gpu), dict(cpu)
