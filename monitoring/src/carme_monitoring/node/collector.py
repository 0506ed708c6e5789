"""One pass over GPUs and jobs for each scrape, as Prometheus metrics.

Names follow Prometheus' conventions (base units, `_total` for counters, ratios from 0 to 1). Series of a job
carry `jobid` (Slurm's), `user` and `account`; they vanish with the job, so that their number is bounded by
what runs.
"""

import heapq
import pwd
import time
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from carme_monitoring.families import Families, single
from carme_monitoring.gpus import GpuProcess, GpuReading, GpuWatch, LibraryState
from carme_monitoring.jobs import (
    Allocation,
    Allocations,
    Cgroups,
    Network,
    ProcessIoRecords,
    RankProgress,
    Traffic,
    Training,
    Usage,
)
from carme_monitoring.node import tables

__all__ = ["NodeCollector"]

MOST_PROCESSES = 8  # of a GPU, with series of their own

_GPU = ("gpu", "uuid")
_JOB = ("jobid", "user", "account")


class NodeCollector(Collector):
    """What a scrape of this node returns.

    Args:
        gpus: The GPUs, whichever make.
        cgroups: Where jobs' usage is read.
        allocations: What the prolog wrote about them.
        training: What ranks say; None where nobody listens.
        network: Where jobs' traffic is read; None: of this node.
        moved: What jobs read and write where control groups do not report; None: nobody says.
    """

    def __init__(
        self,
        gpus: GpuWatch,
        cgroups: Cgroups,
        allocations: Allocations,
        training: Training | None = None,
        network: Network | None = None,
        moved: ProcessIoRecords | None = None,
    ) -> None:
        self._gpus, self._cgroups, self._allocations = gpus, cgroups, allocations
        self._training, self._network = training, network or Network()
        self._moved = moved
        self._users: dict[int, str] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not cost a pass."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, from one pass."""
        start = time.monotonic()
        snapshots = self._gpus.snapshots()
        allocations = self._allocations.all()
        usages = self._cgroups.usage(owned=allocations)
        if self._moved:
            self._moved.add_to(usages)
        users = {usage.job_id: self._user(usage, allocations.get(usage.job_id)) for usage in usages}
        readings = [reading for snapshot in snapshots.values() for reading in snapshot.readings]
        states = GaugeMetricFamily(
            "carme_gpu_library_state",
            "1 for the state in which the library of a GPU vendor is.",
            labels=("vendor", "state"),
        )
        for vendor, snapshot in snapshots.items():
            for state in LibraryState:
                states.add_metric((vendor, state.value), float(snapshot.state is state))
        yield states
        yield from _gpu_metrics(readings)
        yield from self._owners(readings, usages, allocations, users)
        yield from _job_metrics(usages, allocations, users)
        yield from _step_metrics(usages, allocations, users)
        traffic = self._network.traffic([usage.job_id for usage in usages], self._cgroups.processes_of)
        yield from _network_metrics(traffic, allocations, users)
        if self._training:
            yield from _training_metrics(self._training.jobs(), allocations, users)
        yield single(
            "carme_exporter_pass_seconds", "Time of the pass over this node.", time.monotonic() - start
        )

    def _user(self, usage: Usage, allocation: Allocation | None) -> str:
        """The owner's name; from the uid of the job's processes where the prolog wrote nothing."""
        if allocation:
            return allocation.user
        if usage.uid is None:
            return ""
        if usage.uid not in self._users:
            try:
                self._users[usage.uid] = pwd.getpwuid(usage.uid).pw_name
            except KeyError:
                self._users[usage.uid] = str(usage.uid)
        return self._users[usage.uid]

    def _owners(
        self,
        readings: list[GpuReading],
        usages: list[Usage],
        allocations: dict[int, Allocation],
        users: dict[int, str],
    ) -> Iterator[Metric]:
        """What the GPUs of each job do: the same readings, under the job's and the user's name."""
        allotted: dict[int, int] = {}
        named: dict[str, int] = {}
        for usage in usages:
            known = allocations.get(usage.job_id)
            minors = known.gpus if known and known.gpus is not None else usage.devices
            allotted |= dict.fromkeys(minors or (), usage.job_id)
            named |= dict.fromkeys(known.uuids if known else (), usage.job_id)
        families = _JobGpuFamilies()
        for reading in readings:
            gpu = reading.gpu
            jobs = {process.pid: self._cgroups.job_of(process.pid) for process in reading.processes}
            numbers = [number for number in (gpu.minor, gpu.place) if number is not None]
            job_id = named.get(gpu.uuid) or next(
                (allotted[number] for number in numbers if number in allotted), None
            )
            if job_id is None and not allotted and not named:
                # Nobody says what was handed out: who is on the GPU has it.
                job_id = next((number for number in jobs.values() if number), None)
            place = (_name(reading), gpu.uuid)
            if not reading.lost:
                # What has ended since the library listed it is nobody's any more.
                nobody = [pid for pid, number in jobs.items() if number is None]
                foreign = sum(number is not None and number != job_id for number in jobs.values())
                families.foreign.add_metric(place, foreign + sum(map(self._cgroups.is_there, nobody)))
            for process in _largest(reading.processes):
                if (owner := jobs[process.pid]) is not None:
                    labels = (*_job_labels(owner, users, allocations), *place, str(process.pid))
                    families.each.add_metric(labels, process.memory_bytes or 0)
            if job_id is not None:
                families.add((*_job_labels(job_id, users, allocations), *place), reading)
        yield from families.all()


class _JobGpuFamilies:
    """Metrics of GPUs with the names of those who use them."""

    def __init__(self) -> None:
        labels = (*_JOB, *_GPU)
        self._values = Families("carme_job_gpu_", labels, tables.JOB_GPU)
        self.each = GaugeMetricFamily(
            "carme_job_gpu_process_memory_used_bytes",
            "Memory that one of the job's processes holds on a GPU: the largest few of each.",
            labels=(*labels, "pid"),
        )
        self.foreign = GaugeMetricFamily(
            "carme_gpu_foreign_processes",
            "Processes on a GPU that belong to no job to which Slurm gave it.",
            labels=_GPU,
        )

    def add(self, job_labels: tuple[str, ...], reading: GpuReading) -> None:
        """What the GPU of a job does, as far as its library reports."""
        self._values.add(job_labels, reading)

    def all(self) -> tuple[Metric, ...]:
        """All of them, in the order of the page."""
        return (*self._values.all(), self.each, self.foreign)


def _largest(processes: tuple[GpuProcess, ...]) -> list[GpuProcess]:
    """The few that hold most memory, of those that report it: so many series a GPU has at most."""
    measured = [process for process in processes if process.memory_bytes is not None]
    return heapq.nlargest(MOST_PROCESSES, measured, key=lambda process: process.memory_bytes or 0)


def _job_labels(
    job_id: int, users: dict[int, str], allocations: dict[int, Allocation]
) -> tuple[str, str, str]:
    known = allocations.get(job_id)
    return str(job_id), users.get(job_id, ""), known.account if known else ""


def _name(reading: GpuReading) -> str:
    return f"{reading.gpu.index}:{reading.gpu.mig}" if reading.gpu.mig else reading.gpu.index


def _gpu_metrics(readings: list[GpuReading]) -> Iterator[Metric]:
    """What each GPU does, no matter who uses it."""
    yield from _gpu_states(readings)
    families = Families("carme_gpu_", _GPU, tables.GPU)
    for reading in readings:
        families.add((_name(reading), reading.gpu.uuid), reading)
    yield from families.all()
    yield from _gpu_links(readings)


def _gpu_states(readings: list[GpuReading]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "carme_gpu_up",
        "1 for a GPU that answers; 0 for one that was lost, or has not answered since the exporter began.",
        labels=_GPU,
    )
    info = GaugeMetricFamily(
        "carme_gpu_info", "1, with what does not change.", labels=(*_GPU, "model", "minor")
    )
    for reading in readings:
        gpu = reading.gpu
        place = (_name(reading), gpu.uuid)
        up.add_metric(place, float(not reading.lost))
        info.add_metric((*place, gpu.model, "" if gpu.minor is None else str(gpu.minor)), 1)
    yield from (up, info)


def _gpu_links(readings: list[GpuReading]) -> Iterator[Metric]:
    rates = GaugeMetricFamily(
        "carme_gpu_link_bytes_per_second",
        "Data over a link since the last look, where the GPU measures itself.",
        labels=(*_GPU, "link", "direction"),
    )
    errors = CounterMetricFamily(
        "carme_gpu_link_errors",
        "Errors on a link, by what was done about them.",
        labels=(*_GPU, "link", "kind"),
    )
    for reading in readings:
        place = (_name(reading), reading.gpu.uuid)
        for link, value in reading.link_rates.items():
            rates.add_metric((*place, *link), value)
        for which, count in reading.link_errors.items():
            errors.add_metric((*place, *which), count)
    yield from (rates, errors)


def _job_metrics(
    usages: list[Usage], allocations: dict[int, Allocation], users: dict[int, str]
) -> Iterator[Metric]:
    """What each job uses."""
    info = GaugeMetricFamily("carme_job_info", "1, with the partition.", labels=(*_JOB, "partition"))
    cpu = CounterMetricFamily("carme_job_cpu_seconds", "Processor time.", labels=(*_JOB, "mode"))
    cpus = GaugeMetricFamily("carme_job_cpus", "Processors of this node that it was given.", labels=_JOB)
    families = Families("carme_job_", _JOB, tables.JOB)
    for usage in usages:
        job_labels = _job_labels(usage.job_id, users, allocations)
        known = allocations.get(usage.job_id)
        info.add_metric((*job_labels, known.partition if known else ""), 1)
        for mode, seconds in (("user", usage.cpu_user_seconds), ("system", usage.cpu_system_seconds)):
            if seconds is not None:
                cpu.add_metric((*job_labels, mode), seconds)
        if known and known.cpus is not None:
            cpus.add_metric(job_labels, known.cpus)
        families.add(job_labels, usage)
    yield from (info, cpu, cpus, *families.all())


def _step_metrics(
    usages: list[Usage], allocations: dict[int, Allocation], users: dict[int, str]
) -> Iterator[Metric]:
    """What each step of a job uses."""
    families = Families("carme_step_", (*_JOB, "step"), tables.STEP)
    for usage in usages:
        job_labels = _job_labels(usage.job_id, users, allocations)
        for step, used in usage.steps.items():
            families.add((*job_labels, step), used)
    yield from families.all()


def _network_metrics(
    traffic: dict[int, Traffic], allocations: dict[int, Allocation], users: dict[int, str]
) -> Iterator[Metric]:
    """What jobs send and receive, of those whose traffic can be distinguished from others'."""
    known = (
        "in its own network namespace, or on the whole node while it was the only job there, as source says."
    )
    received = CounterMetricFamily(
        "carme_job_network_receive_bytes", f"Bytes received {known}", labels=(*_JOB, "source")
    )
    sent = CounterMetricFamily(
        "carme_job_network_transmit_bytes", f"Bytes sent {known}", labels=(*_JOB, "source")
    )
    for job_id, moved in traffic.items():
        job_labels = (*_job_labels(job_id, users, allocations), moved.source)
        received.add_metric(job_labels, moved.received_bytes)
        sent.add_metric(job_labels, moved.sent_bytes)
    yield from (received, sent)


def _training_metrics(
    jobs: dict[int, list[RankProgress]], allocations: dict[int, Allocation], users: dict[int, str]
) -> Iterator[Metric]:
    """What ranks say of their training, for jobs that are here."""
    families = Families("carme_training_", (*_JOB, "rank"), tables.TRAINING)
    for job_id, ranks in jobs.items():
        if job_id not in users:
            continue
        job_labels = _job_labels(job_id, users, allocations)
        for known in ranks:
            families.add((*job_labels, str(known.rank)), known)
    yield from families.all()
