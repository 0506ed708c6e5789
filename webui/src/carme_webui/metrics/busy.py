"""How busy my GPUs are, for the dashboard: what Prometheus measured of my jobs in the last minutes."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from django.conf import settings
from django.core.cache import cache
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from carme.reports.metrics import WORKS
from carme.reports.prometheus import Prometheus
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.jobs.search import own_jobs
from carme_webui.metrics.scope import Scope
from carme_webui.sessions.models import Session

__all__ = ["Busy", "busy", "has_metrics"]

MINUTES = 10  # over which is averaged: a pause between two epochs is no idleness
REMEMBERED = 15  # seconds, as often as Prometheus looks


@dataclass(frozen=True)
class Busy:
    """The GPUs of one of my jobs.

    Attributes:
        title, address: What the job is called, and its page: that of the session that it serves.
        percent: Of the time in which its GPUs worked, on average.
        gpus, idle: How many they are, and how many of them did nothing.
    """

    title: str
    address: str
    percent: int
    gpus: int
    idle: int

    @property
    def words(self) -> str:
        """The same in words."""
        words = ngettext("%(n)d GPU, %(percent)d %% busy", "%(n)d GPUs, %(percent)d %% busy", self.gpus)
        reported = words % {"n": self.gpus, "percent": self.percent}
        if not self.idle:
            return reported
        if self.idle == self.gpus:
            return f"{reported}: {_('nothing ran on them')}"
        return f"{reported}: {ngettext('%d did nothing', '%d did nothing', self.idle) % self.idle}"


def has_metrics() -> bool:
    """Whether the site measures."""
    return bool(settings.SITE.monitoring.prometheus)


def busy(user: User) -> list[Busy]:
    """My jobs that have GPUs now, the newest first. Raises CarmeError when Prometheus does not answer."""
    key = f"busy-{user.pk}"
    measured: dict[int, list[float]] | None = cache.get(key)
    if measured is None:
        measured = _measured(user.username)
        cache.set(key, measured, REMEMBERED)
    rows = {row.id: row for row in own_jobs(user).filter(id__in=measured, active=True)}
    sessions = {row.job_id: row for row in Session.objects.filter(owner=user, job_id__in=measured)}
    return [
        _of(rows[number], sessions.get(number), measured[number])
        for number in sorted(measured, reverse=True)
        if number in rows
    ]


def _of(job: Job, session: Session | None, shares: list[float]) -> Busy:
    page = session or job
    return Busy(
        title=session.title if session else f"{job.name} ({job.id})",
        address=page.get_absolute_url(),
        percent=round(100 * fmean(shares)),
        gpus=len(shares),
        idle=sum(share <= WORKS for share in shares),
    )


def _measured(user: str) -> dict[int, list[float]]:
    """The share of time in which each GPU of each job of a user worked."""
    site = settings.SITE.monitoring
    query = Scope.of_user(user).query(f"avg_over_time(carme_job_gpu_utilization_ratio[{MINUTES}m])")
    answer = Prometheus(site.prometheus, site.portal_certificates).ask("/api/v1/query", [("query", query)])
    found: defaultdict[int, list[float]] = defaultdict(list)
    for series in answer["data"]["result"]:
        number = str(series["metric"].get("jobid", ""))
        if number.isascii() and number.isdecimal():
            found[int(number)].append(float(series["value"][1]))
    return dict(found)
