"""How many GPUs will be free in the coming days, by Slurm's own plan. Pure functions over times in UTC.

Jobs are taken to use up their time limits and to begin when Slurm means to start them, reservations to keep
whole nodes. So it is the least that is free as things stand: jobs end earlier, and others are submitted.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import accumulate

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
        """A reservation has its nodes whole, unless it ends as it begins."""
        if reservation.start >= reservation.end:
            return
        first, last = self._span(reservation.start, reservation.end)
        for name in reservation.node_names:
            for kind in self._nodes[name].gpus if name in self._nodes else ():
                self._uses.setdefault((name, kind), []).append((first, last, None))

    def add(self, job: Job) -> None:
        """A job has its GPUs until its limit, from now on or from when Slurm means to start it."""
        gpus, waits = job.gpus, job.is_pending
        if waits:
            kind = job.gpu_type or self._only
            self._queued[kind] = self._queued.get(kind, 0) + gpus * job.count
        start = job.planned_start if waits else job.started or self._now
        if start is None:
            return  # Slurm has no plan for it
        if waits:
            start = max(start, self._now)
            minutes = job.minutes_limit
            first, last = self._span(start, None if minutes is None else start + timedelta(minutes=minutes))
        else:
            first, last = self._span(start, job.ends)
            last = max(last, 1)  # what is still there after its limit goes on for now
        if first >= last:
            return
        nodes = job.planned_nodes if waits else job.node_list
        names = expand(nodes) if nodes else ()
        for place, name in enumerate(names):
            if name in self._nodes:
                kind = _type_on(self._nodes[name], job.gpu_type)
                share = gpus // len(names) + (place < gpus % len(names))
                self._uses.setdefault((name, kind), []).append((first, last, share))
        if not names:
            kind = job.gpu_type or self._only
            self._nowhere.setdefault(kind, []).append((first, last, gpus))

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
        # Changes from step to step are added up: most nodes have one or two of them, not one for each step.
        changes, nowhere = [0] * (self._steps + 1), [0] * (self._steps + 1)
        for node in self._cluster.nodes:
            if node.available and (total := node.gpus.get(kind)):
                changes[0] += total
                if uses := self._uses.get((node.name, kind)):
                    _add_changes(changes, total, uses)
        for first, last, gpus in self._nowhere.get(kind, ()):
            if first < last:
                nowhere[first] += gpus
                nowhere[last] -= gpus
        left, taken = (accumulate(row[: self._steps]) for row in (changes, nowhere))
        return [max(0, free - used) for free, used in zip(left, taken, strict=True)]


def _add_changes(changes: list[int], total: int, uses: Iterable[_Use]) -> None:
    """Add how many more of a node's GPUs are free in a step than in the one before, for each step."""
    taken: dict[int, int] = {}
    closed: dict[int, int] = {}
    for first, last, gpus in uses:
        if first < last:
            where, size = (closed, 1) if gpus is None else (taken, gpus)
            where[first] = where.get(first, 0) + size
            where[last] = where.get(last, 0) - size
    left, used, shut = total, 0, 0
    for step in sorted(taken.keys() | closed.keys()):
        used += taken.get(step, 0)
        shut += closed.get(step, 0)
        now = 0 if shut else max(0, total - used)
        changes[step] += now - left
        left = now


def _type_on(node: Node, requested: str | None) -> str:
    return requested if requested in node.gpus else next(iter(node.gpus), requested or "gpu")


def _only_type(nodes: Iterable[Node]) -> str:
    """The type of a job that names none; the first one where there are several."""
    return min((kind for node in nodes for kind in node.gpus), default="gpu")
