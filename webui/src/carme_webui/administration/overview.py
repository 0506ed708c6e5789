"""The cluster at a glance: how busy each node is, what waits, what failed, which services answer."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _

from carme.errors import CarmeError
from carme.jobs import Cluster, Job, Node, Phase, minutes_text
from carme.sessions import Ending
from carme.translation import translated
from carme_webui.administration.node_states import state_words
from carme_webui.cluster import broker
from carme_webui.jobs.models import Mirror
from carme_webui.sessions.models import Session

__all__ = ["Overview", "Queue", "Service", "Tile", "overview"]

#: Steps of the heat map.
LEVELS = 4
RECENT = timedelta(days=1)
MOST_FAILURES = 8
#: Sessions whose start failed.
NOT_STARTED = (Ending.DIED_AT_START, Ending.IMAGE_MISSING, Ending.HOME_NOT_WRITABLE, Ending.REFUSED)
#: What is older than so many looks at Slurm is a problem.
STALE_LOOKS, STALE_SECONDS = 6, 40


@dataclass(frozen=True)
class Tile:
    """A node in the heat map.

    Attributes:
        level: How busy it is, 0 to LEVELS.
        use: The same in words.
    """

    node: Node
    level: int
    use: str
    state: str


@dataclass(frozen=True)
class Queue:
    """The jobs of one partition."""

    partition: str
    running: int
    waiting: int
    gpus_waiting: int
    longest_wait: timedelta | None

    @property
    def wait(self) -> str:
        """The longest wait in words."""
        return minutes_text(max(1, int(self.longest_wait.total_seconds() // 60))) if self.longest_wait else ""


@dataclass(frozen=True)
class Service:
    """Whether something that the portal needs works."""

    title: str
    works: bool
    text: str


@dataclass(frozen=True)
class Overview:
    """All of it; `banner` says why something is missing."""

    tiles: list[Tile]
    queues: list[Queue]
    failures: list[Session]
    services: list[Service]
    banner: str


def overview() -> Overview:
    """The cluster as it is now."""
    now = timezone.now()
    cluster: Cluster | None = None
    jobs: list[Job] = []
    banner = ""
    try:
        cluster, jobs = broker().cluster(), broker().jobs()
    except CarmeError as error:
        banner = str(error)
    tiles = [_tile(node) for node in cluster.nodes] if cluster else []
    return Overview(tiles, _queues(jobs, now), _failures(now), _services(cluster, banner, now), banner)


def _tile(node: Node) -> Tile:
    total, used = sum(node.gpus.values()), sum(node.gpus_used.values())
    words = {"used": used, "total": total}
    use = _("%(used)d of %(total)d GPUs") % words
    if not total:
        total, used = node.cpus, node.cpus_used
        use = _("%(used)d of %(total)d CPUs") % {"used": used, "total": total}
    level = min(LEVELS, -(-used * LEVELS // max(1, total)))
    return Tile(node, level, use, state_words(node.state))


def _queues(jobs: Iterable[Job], now: datetime) -> list[Queue]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.partition, []).append(job)
    queues = []
    for partition, members in sorted(found.items()):
        waiting = [job for job in members if job.state.phase is Phase.PENDING]
        waits = [now - job.submitted for job in waiting if job.submitted]
        running = sum(job.state.phase is Phase.RUNNING for job in members)
        gpus = sum(job.gpus for job in waiting)
        queues.append(Queue(partition, running, len(waiting), gpus, max(waits, default=None)))
    return queues


def _failures(now: datetime) -> list[Session]:
    rows = Session.objects.filter(ending__in=NOT_STARTED, changed__gt=now - RECENT)
    return list(rows.select_related("owner").order_by("-changed")[:MOST_FAILURES])


def _services(cluster: Cluster | None, failure: str, now: datetime) -> list[Service]:
    mirror = Mirror.load()
    stale = timedelta(seconds=STALE_SECONDS + STALE_LOOKS * settings.SITE.slurm.poll_seconds)
    fresh = cluster is not None and now - cluster.taken < stale
    return [
        Service(_("Broker"), cluster is not None, failure or _("answers")),
        Service("Slurm", fresh, _("answers") if fresh else _("has not answered for a while")),
        Service(_("List of jobs"), not mirror.silence, translated(mirror.silence) or _("up to date")),
    ]
