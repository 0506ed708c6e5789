"""The cluster at a glance: how busy each node is, what waits, what failed, which services answer."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf, isfinite
from statistics import median

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _

from carme.errors import CarmeError
from carme.jobs import Cluster, Job, Node, Phase
from carme.reports.prometheus import Prometheus
from carme.sessions import Ending
from carme.translation import translated
from carme_webui.administration.node_states import state_words
from carme_webui.clocks import short_words
from carme_webui.cluster import broker
from carme_webui.help_links import explained
from carme_webui.jobs.models import Mirror
from carme_webui.metrics.charts import Part, Stack
from carme_webui.metrics.sparks import has_metrics
from carme_webui.sessions.models import Session
from carme_webui.sizes import memory_words

__all__ = ["MEASURES", "Overview", "Queue", "Service", "Tile", "measure_titles", "overview"]

#: What the heat map can show.
MEASURES = ("use", "memory", "temperature")
#: Steps of the heat map.
LEVELS = 4
#: Degrees Celsius of a node's hottest GPU from which on a step begins.
WARM = (40, 55, 70, 80)
TEMPERATURES = 'max by (node) (carme_gpu_temperature_celsius{sensor="gpu"})'
RECENT = timedelta(days=1)
MOST_FAILURES = 8
#: Sessions whose start failed.
NOT_STARTED = (Ending.DIED_AT_START, Ending.IMAGE_MISSING, Ending.HOME_NOT_WRITABLE, Ending.REFUSED)
#: Units of waits, each with its seconds, and the waits up to which it is used.
_UNITS = (("min", 60, 3 * 3600), ("h", 3600, 3 * 86400), ("d", 86400, inf))
#: What is older than so many polls of Slurm is a problem.
STALE_POLLS, STALE_SECONDS = 6, 40


@dataclass(frozen=True)
class Tile:
    """A node in the heat map.

    Attributes:
        level: How busy, full or hot it is, 0 to LEVELS.
        use: The same in words.
    """

    node: Node
    level: int
    use: str
    state: str


@dataclass(frozen=True)
class Queue:
    """The jobs of one partition; `waits`: seconds for which each of those that wait has waited."""

    partition: str
    running: int
    waiting: int
    gpus_waiting: int
    waits: Sequence[float]

    @property
    def median_wait(self) -> str:
        """The median in words, of the jobs that wait."""
        return short_words(median(self.waits)) if self.waits else ""

    @property
    def longest_wait(self) -> str:
        """The longest wait in words."""
        return short_words(max(self.waits)) if self.waits else ""


@dataclass(frozen=True)
class Service:
    """Whether something that the portal needs works."""

    title: str
    works: bool
    text: str


@dataclass(frozen=True)
class Overview:
    """All of it; `banner` says why something is missing, `by` is the measure that the tiles show.

    `sums` are figures of the whole cluster, each with its title; `waits` are the queues' as bars.
    """

    by: str
    sums: list[tuple[str, str]]
    tiles: list[Tile]
    queues: list[Queue]
    waits: Stack | None
    failures: list[Session]
    services: list[Service]
    banner: str


def overview(by: str = "use") -> Overview:
    """The cluster as it is now; the heat map by one of MEASURES."""
    now = timezone.now()
    cluster: Cluster | None = None
    jobs: list[Job] = []
    banner = ""
    try:
        cluster, jobs = broker().cluster(), broker().jobs()
    except CarmeError as error:
        banner = explained(error)
    services = _services(cluster, banner, now)
    shown = by if by in measure_titles() else "use"
    degrees: Mapping[str, float] = {}
    if shown == "temperature":
        try:
            degrees = _temperatures()
        except CarmeError as error:
            banner = banner or explained(error)
    tiles = [_tile(node, shown, degrees) for node in cluster.nodes] if cluster else []
    sums = _sums(cluster.nodes, jobs) if cluster else []
    queues = _queues(jobs, now)
    return Overview(shown, sums, tiles, queues, _waits(queues), _failures(now), services, banner)


def measure_titles() -> dict[str, str]:
    """What the heat map can show here, with titles: temperatures need a site that measures."""
    titles = {"use": _("Use"), "memory": _("Memory"), "temperature": _("Temperature")}
    return {name: titles[name] for name in MEASURES if name != "temperature" or has_metrics()}


def _temperatures() -> dict[str, float]:
    """Degrees Celsius of the hottest GPU of each node that is measured. Raises CarmeError."""
    site = settings.SITE.monitoring
    question = [("query", TEMPERATURES)]
    answer = Prometheus(site.prometheus, site.portal_certificates).ask("/api/v1/query", question)
    found = {each["metric"].get("node", ""): float(each["value"][1]) for each in answer["data"]["result"]}
    return {node: degrees for node, degrees in found.items() if isfinite(degrees)}  # NaN: no value


def _tile(node: Node, by: str, degrees: Mapping[str, float]) -> Tile:
    if by == "temperature":
        at = degrees.get(node.name)
        use = _("not measured") if at is None else _("%d °C") % round(at)
        level = sum(at >= limit for limit in WARM) if at is not None else 0
        return Tile(node, level, use, state_words(node.state))
    total, used = sum(node.gpus.values()), sum(node.gpus_used.values())
    use = _("%(used)d of %(total)d GPUs") % {"used": used, "total": total}
    if by == "memory":
        total, used = node.memory_mb, node.memory_used_mb
        use = _("%(used)s of %(most)s") % {"used": memory_words(used), "most": memory_words(total)}
    elif not total:
        total, used = node.cpus, node.cpus_used
        use = _("%(used)d of %(total)d CPUs") % {"used": used, "total": total}
    level = min(LEVELS, -(-used * LEVELS // max(1, total)))
    return Tile(node, level, use, state_words(node.state))


def _sums(nodes: Sequence[Node], jobs: Iterable[Job]) -> list[tuple[str, str]]:
    """How much of the cluster is in use; what nodes have that are not available does not count."""
    there = [node for node in nodes if node.available]
    phases = Counter(job.state.phase for job in jobs)
    gpus = sum(sum(node.gpus.values()) for node in there)
    gpus_used = sum(sum(node.gpus_used.values()) for node in there)
    cpus, cpus_used = sum(node.cpus for node in there), sum(node.cpus_used for node in there)
    memory, memory_used = sum(node.memory_mb for node in there), sum(node.memory_used_mb for node in there)
    return [
        (_("Nodes available"), f"{len(there)} / {len(nodes)}"),
        *([(_("GPUs in use"), f"{gpus_used} / {gpus}")] if gpus else []),
        (_("Processors in use"), f"{cpus_used} / {cpus}"),
        (_("Memory in use"), f"{memory_words(memory_used)} / {memory_words(memory)}"),
        (_("Jobs running"), str(phases[Phase.RUNNING])),
        (_("Jobs waiting"), str(phases[Phase.PENDING])),
    ]


def _queues(jobs: Iterable[Job], now: datetime) -> list[Queue]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.partition, []).append(job)
    queues = []
    for partition, members in sorted(found.items()):
        waiting = [job for job in members if job.state.phase is Phase.PENDING]
        waits = [(now - job.submitted).total_seconds() for job in waiting if job.submitted]
        running = sum(job.state.phase is Phase.RUNNING for job in members)
        gpus = sum(job.gpus for job in waiting)
        queues.append(Queue(partition, running, len(waiting), gpus, waits))
    return queues


def _waits(queues: Iterable[Queue]) -> Stack | None:
    """How long jobs have waited in each partition that has some; None: nothing waits."""
    known = [queue for queue in queues if queue.waits]
    if not known:
        return None
    most = max(max(each.waits) for each in known)
    unit, length = next((unit, length) for unit, length, until in _UNITS if most < until)
    parts = [
        Part(_("median"), [round(median(each.waits) / length, 2) for each in known]),
        Part(_("longest"), [round(max(each.waits) / length, 2) for each in known], total=True),
    ]
    return Stack(_("Waits"), unit, _("Partition"), [each.partition for each in known], parts)


def _failures(now: datetime) -> list[Session]:
    rows = Session.objects.filter(ending__in=NOT_STARTED, changed__gt=now - RECENT)
    return list(rows.select_related("owner").order_by("-changed")[:MOST_FAILURES])


def _services(cluster: Cluster | None, failure: str, now: datetime) -> list[Service]:
    mirror = Mirror.load()
    stale = timedelta(seconds=STALE_SECONDS + STALE_POLLS * settings.SITE.slurm.poll_seconds)
    fresh = cluster is not None and now - cluster.taken < stale
    return [
        Service(_("Broker"), cluster is not None, failure or _("answers")),
        Service("Slurm", fresh, _("answers") if fresh else _("has not answered for a while")),
        Service(_("List of jobs"), not mirror.silence, translated(mirror.silence) or _("up to date")),
    ]
