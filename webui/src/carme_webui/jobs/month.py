"""What somebody used this month of what they may use."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.core.cache import cache
from django.db.models import Q
from django.utils import timezone

from carme_webui.accounts.models import User
from carme_webui.clocks import site_zone
from carme_webui.jobs.search import own_jobs
from carme_webui.projects.models import Project, own_projects

__all__ = ["Month", "Share", "month_of"]

#: Seconds for which the sum of a user is remembered.
REMEMBERED = 60
#: A job that began in this month was submitted at most so long before.
LONGEST_WAIT = timedelta(days=62)


@dataclass(frozen=True)
class Share:
    """A project's GPU-hours: those that Slurm has counted, of those that were granted."""

    project: Project
    used: float
    granted: int

    @property
    def percent(self) -> int:
        """How much of them is used up."""
        return min(100, round(100 * self.used / self.granted)) if self.granted else 100


@dataclass(frozen=True)
class Month:
    """One user's use in the month that runs.

    Attributes:
        jobs: Jobs that ran in it, sessions and tasks of arrays included.
        gpu_hours: GPUs by the hours for which jobs had them.
        cpu_hours: The same of processors.
        shares: Projects whose GPU-hours are limited.
    """

    start: datetime
    jobs: int
    gpu_hours: float
    cpu_hours: float
    shares: list[Share]


def month_of(user: User) -> Month:
    """What a user used since the first day of the month by the site's clocks."""
    now = timezone.now()
    start = now.astimezone(site_zone()).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    key = f"month-{user.pk}"
    known: tuple[datetime, int, float, float] | None = cache.get(key)
    if known is None or known[0] != start:
        known = (start, *_sums(user, start, now))
        cache.set(key, known, REMEMBERED)
    _start, jobs, gpu_hours, cpu_hours = known
    shares = [
        Share(project, round(project.use.gpu_hours, 1), project.gpu_hours)
        for project in own_projects(user)
        if project.gpu_hours is not None
    ]
    return Month(start, jobs, gpu_hours, cpu_hours, shares)


def _sums(user: User, start: datetime, now: datetime) -> tuple[int, float, float]:
    rows = own_jobs(user).filter(submitted__gte=start - LONGEST_WAIT, started__isnull=False)
    ended_since = Q(ended__gt=start) | Q(ended=None, active=True)
    found = rows.filter(ended_since).values_list("gpus", "cpus", "started", "ended")
    return _added_up(found, start, now)


def _added_up(
    rows: Iterable[tuple[int, int, datetime, datetime | None]], start: datetime, now: datetime
) -> tuple[int, float, float]:
    jobs, gpu_hours, cpu_hours = 0, 0.0, 0.0
    for gpus, cpus, started, ended in rows:
        hours = max(0.0, (min(ended or now, now) - max(started, start)) / timedelta(hours=1))
        jobs, gpu_hours, cpu_hours = jobs + 1, gpu_hours + gpus * hours, cpu_hours + cpus * hours
    return jobs, gpu_hours, cpu_hours
