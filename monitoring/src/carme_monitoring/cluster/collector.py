"""The site as Prometheus metrics: queues, nodes, who has what, sessions, services. One scrape, one question.

Labels are bounded: partitions, accounts, users, reservations and licences keep at most `MOST` values, and the
smaller ones are added up under `(others)`; users and accounts have series only while they have jobs.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from carme.broker.overview import JobFigures, Overview
from carme.errors import CarmeError
from carme.jobs import Cluster, Licence, Node, Phase, Reservation
from carme_monitoring.cluster.bounds import MOST, largest
from carme_monitoring.cluster.events import Events
from carme_monitoring.cluster.health import Answer
from carme_monitoring.families import Families, Table, Value, single

__all__ = ["ClusterCollector"]

_log = logging.getLogger("carme.monitoring")

MEBI = 1 << 20

_RESERVATION: Table[Reservation] = (
    Value("start_timestamp_seconds", "When the reservation begins.", lambda each: each.start.timestamp()),
    Value("end_timestamp_seconds", "When it ends.", lambda row: row.end.timestamp()),
    Value("nodes", "Nodes that it keeps.", lambda row: len(row.node_names)),
    Value("gpus", "GPUs that it keeps.", lambda row: row.gpus),
)
_LICENCE: Table[Licence] = (
    Value("total", "Places of the licence.", lambda row: row.total),
    Value("used", "Places that jobs hold.", lambda row: row.used),
    Value("reserved", "Places that are reserved.", lambda row: row.reserved),
)


class ClusterCollector(Collector):
    """What a scrape of the cluster returns.

    Args:
        overview: Asks the broker; raises CarmeError when it does not answer.
        health: Asks the other services.
        most: Values of a label.
    """

    def __init__(
        self, overview: Callable[[], Overview], health: Callable[[], dict[str, Answer]], most: int = MOST
    ) -> None:
        self._overview, self._health, self._most = overview, health, most
        self._events = Events()
        self._last_message = ""
        self._turn = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not cost a question."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, from one question to the broker and one to each service."""
        with self._turn:  # two scrapes at once would count one event twice
            yield from list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        start = time.monotonic()
        answers = self._health()
        requested = time.monotonic()
        try:
            overview, message = self._overview(), ""
        except CarmeError as error:
            overview, message = None, str(error)
        answers["broker"] = Answer(overview is not None, time.monotonic() - requested)
        if message != self._last_message:
            _log.warning("%s", message) if message else _log.info("The broker answers again.")
            self._last_message = message
        yield from _services(answers)
        if overview is not None:
            self._events.take(overview)
            yield from self._site(overview)
        yield from self._events.collect()
        yield single("carme_cluster_pass_seconds", "Time of this pass.", time.monotonic() - start)

    def _site(self, overview: Overview) -> Iterator[Metric]:
        yield single("carme_slurm_up", "1 while Slurm answers the broker.", float(not overview.failure))
        if overview.answered:
            yield single(
                "carme_slurm_answered_timestamp_seconds",
                "When Slurm answered the broker last.",
                overview.answered.timestamp(),
            )
        if overview.answered is None:
            return  # the broker has seen nothing yet: no figures are better than zeros
        jobs = _typed(overview.jobs, overview.cluster)
        yield from self._queue(jobs, overview.cluster)
        for label in ("account", "user"):
            yield from self._shares(label, jobs)
        if overview.cluster:
            yield from self._cluster(overview.cluster)
        yield from self._reservations(overview)
        yield from self._licences(overview)
        states = GaugeMetricFamily("carme_sessions", "Sessions, by state.", labels=("state",))
        for state, count in Counter(session.state for session in overview.sessions).items():
            if state != "ended":
                states.add_metric((state.value,), count)
        yield states

    def _queue(self, jobs: list[JobFigures], cluster: Cluster | None) -> Iterator[Metric]:
        names = [partition.name for partition in cluster.partitions] if cluster else []
        sizes = Counter(dict.fromkeys(names, 0))
        sizes.update(job.partition for job in jobs)
        partitions = self._largest(sizes)
        # None is a figure, too: without it readers would take the last one for what is now.
        states = Counter({(partitions[name], state): 0 for name in names for state in ("pending", "running")})
        reasons: Counter[tuple[str, str]] = Counter()
        wanted: Counter[tuple[str, str]] = Counter()
        longest: defaultdict[str, float] = defaultdict(float)
        now = datetime.now(UTC)
        for job in jobs:
            if job.state.phase is Phase.OVER:
                continue
            partition = partitions[job.partition]
            states[partition, job.state.value.lower()] += 1
            if job.state.phase is Phase.PENDING:
                reasons[partition, job.reason.partition(",")[0].strip("()") or "None"] += 1
                wanted[partition, job.gpu_type or "gpu"] += job.gpus
                if job.submitted:
                    longest[partition] = max(longest[partition], (now - job.submitted).total_seconds())
        yield _counted("carme_queue_jobs", "Jobs, by state.", ("partition", "state"), states)
        all_reasons: Counter[str] = Counter()
        for (_, reason), count in reasons.items():
            all_reasons[reason] += count
        kinds = self._largest(all_reasons)
        reported: Counter[tuple[str, str]] = Counter()
        for (partition, reason), count in reasons.items():
            reported[partition, kinds[reason]] += count
        yield _counted(
            "carme_queue_pending_jobs",
            "Jobs that wait, by Slurm's reason.",
            ("partition", "reason"),
            reported,
        )
        yield _counted(
            "carme_queue_pending_gpus",
            "GPUs that waiting jobs ask for.",
            ("partition", "gpu_type"),
            Counter({key: count for key, count in wanted.items() if count}),
        )
        family = GaugeMetricFamily(
            "carme_queue_longest_wait_seconds",
            "Time that the oldest waiting job has waited.",
            labels=("partition",),
        )
        for partition, seconds in longest.items():
            family.add_metric((partition,), seconds)
        yield family

    def _shares(self, label: str, jobs: list[JobFigures]) -> Iterator[Metric]:
        """What the running jobs of each account, or user, hold."""
        held: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)  # GPUs, processors, bytes, jobs
        gpus: Counter[tuple[str, str]] = Counter()
        waiting: Counter[str] = Counter()
        for job in jobs:
            holder = str(getattr(job, label))
            if job.state.phase is Phase.PENDING:
                waiting[holder] += 1
                held.setdefault(holder, [0.0] * 4)  # it has series while it waits, too
            elif job.state.phase is not Phase.OVER:
                for place, amount in enumerate((job.gpus, job.cpus, job.memory_mb * MEBI, 1)):
                    held[holder][place] += amount
                if job.gpus:
                    gpus[holder, job.gpu_type or "gpu"] += job.gpus
        names = largest({holder: tuple(amounts) for holder, amounts in held.items()}, self._most)
        families = {
            name: GaugeMetricFamily(f"carme_{label}_{name}", text, labels=(label,))
            for name, text in {
                "cpus": f"Processors that the {label}'s running jobs hold.",
                "memory_bytes": f"Memory that the {label}'s running jobs hold.",
                "running_jobs": f"The {label}'s running jobs.",
                "pending_jobs": f"The {label}'s waiting jobs.",
            }.items()
        }
        sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        for holder, (_, cpus, memory, running) in held.items():
            for place, amount in enumerate((cpus, memory, running, waiting[holder])):
                sums[names[holder]][place] += amount
        for holder, amounts in sums.items():
            for family, amount in zip(families.values(), amounts, strict=True):
                family.add_metric((holder,), amount)
        by_type: Counter[tuple[str, str]] = Counter()
        for (holder, kind), count in gpus.items():
            by_type[names[holder], kind] += count
        yield from families.values()
        yield _counted(
            f"carme_{label}_gpus",
            f"GPUs that the {label}'s running jobs hold.",
            (label, "gpu_type"),
            by_type,
        )

    def _cluster(self, cluster: Cluster) -> Iterator[Metric]:
        yield single(
            "carme_cluster_seen_timestamp_seconds",
            "When Slurm last reported nodes.",
            cluster.taken.timestamp(),
        )
        yield from self._sizes(cluster.nodes)
        yield from self._gpus(cluster.nodes)
        yield from self._nodes(cluster.nodes)
        yield from self._partitions(cluster)

    def _sizes(self, nodes: list[Node]) -> Iterator[Metric]:
        for name, text, value in (
            ("cpus", "Processors of all nodes.", sum(node.cpus for node in nodes)),
            ("cpus_allocated", "Processors that jobs hold.", sum(node.cpus_used for node in nodes)),
            ("memory_bytes", "Memory of all nodes.", sum(node.memory_mb for node in nodes) * MEBI),
            (
                "memory_allocated_bytes",
                "Memory that jobs hold.",
                sum(node.memory_used_mb for node in nodes) * MEBI,
            ),
        ):
            yield single(f"carme_cluster_{name}", text, float(value))

    def _gpus(self, nodes: list[Node]) -> Iterator[Metric]:
        for name, text, attribute in (
            ("gpus", "GPUs of all nodes.", "gpus"),
            ("gpus_allocated", "GPUs that jobs hold.", "gpus_used"),
        ):
            counted: Counter[str] = Counter()
            for node in nodes:
                counted.update(dict.fromkeys(node.gpus, 0))
                counted.update(getattr(node, attribute))
            family = GaugeMetricFamily(f"carme_cluster_{name}", text, labels=("gpu_type",))
            for kind, count in counted.items():
                family.add_metric((kind,), count)
            yield family
        usable: Counter[str] = Counter()
        for node in nodes:
            if node.available:
                usable.update(node.gpus)
        family = GaugeMetricFamily(
            "carme_cluster_gpus_usable", "GPUs of nodes that take jobs.", labels=("gpu_type",)
        )
        for kind, count in usable.items():
            family.add_metric((kind,), count)
        yield family

    def _nodes(self, nodes: list[Node]) -> Iterator[Metric]:
        states = GaugeMetricFamily("carme_nodes", "Nodes, by Slurm's state.", labels=("state",))
        counts = Counter(node.state.lower().rstrip("*~#!%$@^-") for node in nodes)
        names = self._largest(counts)
        reported: Counter[str] = Counter()
        for state, count in counts.items():
            reported[names[state]] += count
        for state, count in reported.items():
            states.add_metric((state,), count)
        yield states
        available = GaugeMetricFamily(
            "carme_node_available", "1 for a node that takes jobs.", labels=("node",)
        )
        powered = GaugeMetricFamily(
            "carme_node_powered_on",
            "1 for a node that is on, 0 while power saving has it off or switches it.",
            labels=("node",),
        )
        for node in nodes:
            available.add_metric((node.name,), float(node.available))
            powered.add_metric((node.name,), float(node.is_switched_on))
        yield from (available, powered)

    def _partitions(self, cluster: Cluster) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "carme_partition_up", "1 for a partition that takes jobs.", labels=("partition",)
        )
        members = GaugeMetricFamily(
            "carme_partition_nodes_available",
            "Nodes of the partition that take jobs.",
            labels=("partition",),
        )
        good = {node.name for node in cluster.nodes if node.available}
        for partition in cluster.partitions[: self._most]:
            up.add_metric((partition.name,), float(partition.state == "UP"))
            members.add_metric((partition.name,), len(good.intersection(partition.node_names)))
        yield from (up, members)

    def _reservations(self, overview: Overview) -> Iterator[Metric]:
        families = Families("carme_reservation_", ("reservation",), _RESERVATION)
        soonest = sorted(overview.reservations or (), key=lambda each: each.start)
        for reservation in soonest[: self._most]:
            families.add((reservation.name,), reservation)
        yield from families.all()

    def _licences(self, overview: Overview) -> Iterator[Metric]:
        families = Families("carme_licence_", ("licence",), _LICENCE)
        for licence in (overview.licences or [])[: self._most]:
            families.add((licence.name,), licence)
        yield from families.all()

    def _largest(self, counts: Counter[str]) -> dict[str, str]:
        return largest({name: (float(count),) for name, count in counts.items()}, self._most)


def _typed(jobs: list[JobFigures], cluster: Cluster | None) -> list[JobFigures]:
    """The jobs, with the type of their GPUs where they named none and their partition has just one."""
    types = {node.name: set(node.gpus) for node in cluster.nodes} if cluster else {}
    only = {}
    for partition in cluster.partitions if cluster else ():
        found = set().union(*(types.get(name, set()) for name in partition.node_names))
        if len(found) == 1:
            only[partition.name] = found.pop()
    return [
        job.model_copy(update={"gpu_type": only[job.partition]})
        if job.gpus and job.gpu_type is None and job.partition in only
        else job
        for job in jobs
    ]


def _services(answers: dict[str, Answer]) -> Iterator[Metric]:
    up = GaugeMetricFamily("carme_service_up", "1 for a service that answers.", labels=("service",))
    seconds = GaugeMetricFamily(
        "carme_service_answer_seconds", "Time until the service answered.", labels=("service",)
    )
    for name, answer in answers.items():
        up.add_metric((name,), float(answer.up))
        if answer.up:
            seconds.add_metric((name,), answer.seconds)
    yield from (up, seconds)


def _counted(name: str, text: str, labels: tuple[str, ...], counts: "Counter[tuple[str, str]]") -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, count in counts.items():
        family.add_metric(key, count)
    return family
