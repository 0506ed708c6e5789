"""How many GPUs will be free in the coming days, by Slurm's own plan. Pure functions over times in UTC.

Jobs are taken to use up their time limits and to begin when Slurm means to start them, reservations to keep
whole nodes. So it is the least that is free as things stand: jobs end earlier, and others are submitted.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from pydantic import BaseModel, ConfigDict

from carme.jobs.cluster import Cluster, Node, Reservation
from carme.jobs.nodes import expand
from carme.jobs.status import Job

__all__ = ["Forecast", "GpuForecast", "forecast"]


class GpuForecast(BaseModel):
    """The GPUs of one type.

    Attributes:
        total: On all nodes, also those that take no jobs.
        queued: GPUs that waiting jobs have requested.
        free: How many are free throughout each step from now on.
    """

    model_config = ConfigDict(frozen=True)

    gpu_type: str
    total: int
    queued: int
    free: list[int]


class Forecast(BaseModel):
    """All types of GPUs, and the moment from which steps of `step_minutes` are counted."""

    model_config = ConfigDict(frozen=True)

    start: datetime
    step_minutes: int
    kinds: list[GpuForecast] = []


#: A part of a node, or all of it (None), from a first step up to, but without, a last one.
_Use = tuple[int, int, int | None]


def forecast(
    cluster: Cluster,
    jobs: Iterable[Job],
    reservations: Iterable[Reservation],
    now: datetime,
    *,
    steps: int = 144,
    step_minutes: int = 30,
) -> Forecast:
    """What is free from now on; 144 half hours, three days, by default."""
    plan = _Plan(cluster, now, steps, timedelta(minutes=step_minutes))
    for reservation in reservations:
        plan.reserve(reservation)
    for job in jobs:
        if job.is_active and job.gpus:
            plan.add(job)
    return Forecast(start=now, step_minutes=step_minutes, kinds=plan.kinds())


class _Plan:
    """Who uses which GPUs in which steps."""

    def __init__(self, cluster: Cluster, now: datetime, steps: int, step: timedelta) -> None:
        self._cluster, self._now, self._steps, self._step = cluster, now, steps, step
        self._nodes = {node.name: node for node in cluster.nodes}
        self._only = _only_type(cluster.nodes)
        self._uses: dict[tuple[str, str], list[_Use]] = {}
        self._nowhere: dict[str, list[tuple[int, int, int]]] = {}
        self._queued: dict[str, int] = {}

    def _span(self, start: datetime, end: datetime | None) -> tuple[int, int]:
        """The steps that a time touches."""
        first = max(0, (start - self._now) // self._step)
        last = self._steps if end is None else min(self._steps, -((self._now - end) // self._step))
        return first, last

    def reserve(self, reservation: Reservation) -> None:
        """A reservation has its nodes whole."""
        first, last = self._span(reservation.start, reservation.end)
        for name in reservation.node_names:
            for kind in self._nodes[name].gpus if name in self._nodes else ():
                self._uses.setdefault((name, kind), []).append((first, last, None))

    def add(self, job: Job) -> None:
        """A job has its GPUs until its limit, from now on or from when Slurm means to start it."""
        waits = job.is_pending
        if waits:
            kind = job.gpu_type or self._only
            self._queued[kind] = self._queued.get(kind, 0) + job.gpus * job.count
        start = job.planned_start if waits else job.started or self._now
        if start is None:
            return  # Slurm has no plan for it
        start = max(start, self._now) if waits else start
        end = job.ends
        if waits and job.minutes_limit is not None:
            end = start + timedelta(minutes=job.minutes_limit)
        # What is still there after its limit goes on for now.
        first, last = self._span(start, end)
        last = max(last, 1) if not waits else last
        names = expand(job.planned_nodes if waits else job.node_list)
        for place, name in enumerate(names):
            gpus = job.gpus // len(names) + (place < job.gpus % len(names))
            if name in self._nodes:
                kind = _type_on(self._nodes[name], job.gpu_type)
                self._uses.setdefault((name, kind), []).append((first, last, gpus))
        if not names:
            kind = job.gpu_type or self._only
            self._nowhere.setdefault(kind, []).append((first, last, job.gpus))

    def kinds(self) -> list[GpuForecast]:
        """What that leaves of each type."""
        kinds = sorted({kind for node in self._cluster.nodes for kind in node.gpus})
        return [
            GpuForecast(
                gpu_type=kind,
                total=sum(node.gpus.get(kind, 0) for node in self._cluster.nodes),
                queued=self._queued.get(kind, 0),
                free=self._free(kind),
            )
            for kind in kinds
        ]

    def _free(self, kind: str) -> list[int]:
        free = [0] * self._steps
        for node in self._cluster.nodes:
            if node.available and node.gpus.get(kind):
                left = _left(node.gpus[kind], self._uses.get((node.name, kind), ()), self._steps)
                free = [sum(pair) for pair in zip(free, left, strict=True)]
        for first, last, gpus in self._nowhere.get(kind, ()):
            for place in range(first, last):
                free[place] = max(0, free[place] - gpus)
        return free


def _left(total: int, uses: Iterable[_Use], steps: int) -> list[int]:
    """What is left of a node's GPUs in each step."""
    changes, closed = [0] * (steps + 1), [0] * (steps + 1)
    for first, last, gpus in uses:
        if first < last:
            where, size = (closed, 1) if gpus is None else (changes, gpus)
            where[first] += size
            where[last] -= size
    left, taken, shut = [], 0, 0
    for place in range(steps):
        taken += changes[place]
        shut += closed[place]
        left.append(0 if shut else max(0, total - taken))
    return left


def _type_on(node: Node, requested: str | None) -> str:
    return requested if requested in node.gpus else next(iter(node.gpus), requested or "gpu")


def _only_type(nodes: Iterable[Node]) -> str:
    """The type of a job that names none; the first one where there are several."""
    return min((kind for node in nodes for kind in node.gpus), default="gpu")
