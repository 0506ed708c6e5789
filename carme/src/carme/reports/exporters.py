"""A running job's usage from the exporters of its nodes themselves, where the site has no Prometheus.

Nobody keeps what they serve. So a job is followed from when somebody first looks at it, as long as somebody
does, and what is known of it is about that time alone.
"""

import asyncio
import http.client
import math
import re
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from carme.errors import CarmeError
from carme.jobs import Job
from carme.jobs.nodes import expand
from carme.reports.metrics import (
    POINTS,
    SHORTEST_STEP,
    Series,
    curves_of,
    is_usable,
    rank_curves,
    rank_use,
    usage_of,
)
from carme.reports.models import Curve, RankUse, Usage
from carme.reports.prometheus import connection
from carme.reports.record import MOST_RANKS
from carme.translation import message as _

__all__ = ["Exporters"]

PATIENCE = 3.0  # seconds for one node
SAMPLE_TIMEOUT = 6.0  # for all nodes of a job
CONNECTIONS, CONNECTIONS_PER_SAMPLE = 8, 4  # at the same time
LEAST_SECONDS = 10.0  # between two polls of a job, also after a failed one
FORGOTTEN_SECONDS = 900.0  # after the last sample of it
MOST_JOBS, MOST_NODES, MOST_SAMPLES = 256, 32, 480
MOST_VALUES = 8_000_000  # of all jobs, of 8 bytes each
MOST_SERIES = 2048  # of a job on a node
MOST_KEYS = 50 * MOST_SERIES  # of a job: it begins anew over them
KEY_VALUES = 32  # values that take as much memory as a key
MOST_BYTES = 16 << 20  # of a node's answer
GAP = 5  # steps: over more of them nothing is drawn

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LEVELS = {
    "busy": "carme_job_gpu_utilization_ratio",
    "gpu_memory": "carme_job_gpu_memory_used_bytes",
    "gpu_total": "carme_job_gpu_memory_total_bytes",
    "power": "carme_job_gpu_power_watts",
    "cpus": "carme_job_cpus",
    "memory": "carme_job_memory_used_bytes",
    "peak": "carme_job_memory_peak_bytes",
    "limit": "carme_job_memory_limit_bytes",
    "read": "carme_job_io_read_bytes_total",
    "written": "carme_job_io_written_bytes_total",
}
_SPEEDS = {
    "cpu": "carme_job_cpu_seconds_total",
    "received": "carme_job_network_receive_bytes_total",
    "sent": "carme_job_network_transmit_bytes_total",
}
_TRAINED = "carme_training_seconds_total"
_WAITED = "carme_training_wait_seconds_total"

_Line = list[float | None]


class _Key(NamedTuple):
    """A series of a job on a node."""

    name: str
    node: str
    gpu: str = ""
    rank: str = ""
    cause: str = ""


class _Sample(NamedTuple):
    """What the exporters served at a moment, in seconds since 1970: a value for each key, or NaN."""

    moment: float
    values: "array[float]"


class _ObservedJob:
    """A job that somebody observes.

    Attributes:
        keys: Its series with their places in the values of samples, which share them.
        size: What all that takes, in values.
        failure: When the last sample failed, and why; None: it did not.
    """

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque()
        self.keys: dict[_Key, int] = {}
        self.size = 0
        self.wanted = 0.0
        self.failure: tuple[float, str] | None = None
        self.lock = asyncio.Lock()

    def add(self, moment: float, found: dict[_Key, float]) -> None:
        """Keep a sample."""
        if len(self.keys.keys() | found.keys()) > MOST_KEYS:
            self.clear()
        for key in found:
            self.keys.setdefault(key, len(self.keys))
        values = array("d", (found.get(key, math.nan) for key in self.keys))
        self.samples.append(_Sample(moment, values))
        self._measure()
        if len(self.samples) > MOST_SAMPLES:
            self.drop()

    def drop(self) -> None:
        """Forget the oldest sample."""
        self.samples.popleft()
        if not self.samples:
            self.keys.clear()
        self._measure()

    def clear(self) -> None:
        """Forget all samples."""
        self.samples.clear()
        self.keys.clear()
        self._measure()

    def _measure(self) -> None:
        self.size = KEY_VALUES * len(self.keys) + sum(len(sample.values) for sample in self.samples)


class Exporters:
    """The exporters of the site's nodes, each with a certificate for its node's name.

    Args:
        port: Where they listen.
        certificates: The folder with `tls.pem` and `ca.crt` of a reader; without it nothing is known.
        clock: Seconds since 1970.
    """

    def __init__(self, port: int, certificates: Path, clock: Callable[[], float] = time.time) -> None:
        self._port, self._certificates, self._clock = port, certificates, clock
        self._followed: dict[int, _ObservedJob] = {}
        # Threads of its own: a node that is away takes seconds, and asyncio's few serve every connection.
        self._askers = ThreadPoolExecutor(CONNECTIONS, "carme-exporters")
        self._summing = ThreadPoolExecutor(1, "carme-exporters-sum")

    @property
    def exist(self) -> bool:
        """Whether the site has made certificates for their readers."""
        return (self._certificates / "tls.pem").exists()

    async def usage(
        self, job: Job, addresses: Mapping[str, str] | None = None
    ) -> tuple[Usage | None, list[Curve]]:
        """What a running job used since somebody began to look; None if nothing is known about that.

        Args:
            addresses: Where nodes are reached, by their names; those that are missing, at their names.

        Raises:
            CarmeError: No exporter answers.
        """
        now = self._clock()
        for number, known in list(self._followed.items()):
            if now - known.wanted > FORGOTTEN_SECONDS:
                del self._followed[number]
        followed = self._followed.setdefault(job.id, _ObservedJob())
        followed.wanted = now
        while len(self._followed) > MOST_JOBS:
            del self._followed[min(self._followed, key=lambda number: self._followed[number].wanted)]
        async with followed.lock:
            if job.started and followed.samples and followed.samples[0].moment < job.started.timestamp():
                followed.clear()  # of an earlier job of the number
            if followed.failure and now - followed.failure[0] < LEAST_SECONDS:
                raise _unanswered(followed.failure[1])
            if not followed.samples or now - followed.samples[-1].moment >= LEAST_SECONDS:
                found, why = await self._sample(job, addresses or {})
                followed.failure = (self._clock(), why) if why else None
                if why:
                    raise _unanswered(why)
                followed.add(now, found)
                self._bound(followed)
            keys, samples = list(followed.keys), list(followed.samples)
            return await asyncio.get_running_loop().run_in_executor(self._summing, _summary, keys, samples)

    def _bound(self, current: _ObservedJob) -> None:
        """Forget the oldest samples of all jobs while they are too many, but not the last of this job."""
        while sum(known.size for known in self._followed.values()) > MOST_VALUES:
            droppable = [
                known
                for known in self._followed.values()
                if len(known.samples) > (1 if known is current else 0)
            ]
            if not droppable:
                return
            min(droppable, key=lambda known: known.samples[0].moment).drop()

    async def _sample(self, job: Job, addresses: Mapping[str, str]) -> tuple[dict[_Key, float], str]:
        """What the exporters serve, or why none of them answers."""
        turns = asyncio.Semaphore(CONNECTIONS_PER_SAMPLE)  # one job's nodes leave threads for other jobs

        async def answer(node: str) -> dict[_Key, float]:
            address = addresses.get(node, node)
            async with turns:
                return await asyncio.get_running_loop().run_in_executor(
                    self._askers, self._ask, node, address, job.id
                )

        tasks = [asyncio.ensure_future(answer(node)) for node in expand(job.node_list)[:MOST_NODES]]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=SAMPLE_TIMEOUT)
        finally:
            for task in tasks:
                task.cancel()
        found: dict[_Key, float] = {}
        failures: list[str] = []
        for served in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(served, asyncio.CancelledError):
                failures.append(f"no answer within {SAMPLE_TIMEOUT:g} s")
            elif isinstance(served, (OSError, http.client.HTTPException, ValueError)):
                failures.append(str(getattr(served, "strerror", None) or served or type(served).__name__))
            elif isinstance(served, BaseException):
                raise served
            else:
                found |= served
        return found, failures[0] if failures and len(failures) == len(tasks) else ""

    def _ask(self, node: str, address: str, job_id: int) -> dict[_Key, float]:
        """A job's series on a node. Raises OSError, HTTPException, ValueError."""
        until = time.monotonic() + SAMPLE_TIMEOUT
        try:
            text = self._read(node, address, until)
        except OSError as failure:
            if address == node:
                raise
            try:  # its exporter need not listen there: the site may have named another address
                text = self._read(node, node, until)
            except OSError:
                raise failure from None
        return _series(text, node, job_id)

    def _read(self, node: str, address: str, until: float) -> str:
        """What a node's exporter serves. Raises OSError, HTTPException, ValueError."""
        named = urlsplit(f"https://{node}:{self._port}")
        opened = connection(named, self._certificates, PATIENCE, reached_at=address)
        try:
            opened.request("GET", "/metrics")
            response = opened.getresponse()
            body = bytearray()
            while len(body) < MOST_BYTES and (part := response.read1(1 << 20)):
                if time.monotonic() > until:
                    raise TimeoutError("it answers too slowly")
                body += part
        finally:
            opened.close()
        if response.status != http.client.OK:
            raise ValueError(f"it answered with status {response.status}")
        return body.decode("utf-8", "replace")


def _unanswered(why: str) -> CarmeError:
    return CarmeError(
        _("The exporters of the job's nodes do not answer: {why}.", why=why),
        _(
            "Try again in a moment; an administrator finds the cause with 'systemctl status "
            "carme-node-exporter' on the node."
        ),
        code="metrics",
    )


def _series(text: str, node: str, job_id: int) -> dict[_Key, float]:
    """A job's series in Prometheus' text format; those that differ in other labels only are added up."""
    found: dict[_Key, float] = {}
    mark = f'jobid="{job_id}"'
    for line in text.splitlines():
        name, _brace, rest = line.partition("{")
        labels, _space, value = rest.rpartition("} ")
        if mark not in labels:
            continue
        known = dict(_LABEL.findall(labels))
        if known.get("jobid") != str(job_id) or not is_usable(number := float(value)):
            continue
        key = _Key(name, node, *(known.get(label, "") for label in ("gpu", "rank", "cause")))
        found[key] = found.get(key, 0.0) + number
        if len(found) > MOST_SERIES:
            raise ValueError(f"{node} has more than {MOST_SERIES} series of the job")
    return found


class _Window:
    """Looks at one job, brought to equal steps.

    Attributes:
        step: Seconds: of a long time they are longer, so that lines stay short.
        count: Values of each line.
        samples: By the places of their steps.
        columns: Series of each metric, with their places in the values of samples.
    """

    def __init__(self, keys: Sequence[_Key], samples: Sequence[_Sample]) -> None:
        begin = samples[0].moment
        self.step = max(SHORTEST_STEP, math.ceil((samples[-1].moment - begin) / POINTS))
        at_place = {round((sample.moment - begin) / self.step): sample for sample in samples}
        self.samples = sorted(at_place.items())
        self.count = self.samples[-1][0] + 1
        self.columns: dict[str, list[tuple[int, _Key]]] = {}
        for column, key in enumerate(keys):
            self.columns.setdefault(key.name, []).append((column, key))

    def levels(self, name: str) -> dict[_Key, _Line]:
        """A metric's values, straight lines between two samples."""
        return self._lines(name, _level)

    def speeds(self, name: str, cause: str = "") -> dict[_Key, _Line]:
        """How much a metric that only grows grew in each second."""
        lines = self._lines(name, _speed)
        return {
            key: [None if value is None else value / self.step for value in line]
            for key, line in lines.items()
            if key.cause == cause
        }

    def values(self, column: int) -> list[tuple[int, float]]:
        """What is known of a series, with the places."""
        known = (
            (place, sample.values[column]) for place, sample in self.samples if column < len(sample.values)
        )  # those before its first value are shorter
        return [(place, value) for place, value in known if not math.isnan(value)]

    def _lines(
        self, name: str, between: Callable[[_Line, int, float, int, float], None]
    ) -> dict[_Key, _Line]:
        found = {}
        for column, key in self.columns.get(name, ()):
            if not (known := self.values(column)):
                continue
            line: _Line = [None] * self.count
            if between is _level:
                line[known[0][0]] = known[0][1]
            for (place, value), (then, last) in pairwise(known):
                if then - place <= GAP:
                    between(line, place, value, then, last)
                elif between is _level:
                    line[then] = last
            found[key] = line
        return found


def _level(line: _Line, place: int, value: float, then: int, last: float) -> None:
    for at in range(place + 1, then + 1):
        line[at] = value + (last - value) * (at - place) / (then - place)


def _speed(line: _Line, place: int, value: float, then: int, last: float) -> None:
    if last >= value:  # one that goes down began anew
        line[place + 1 : then + 1] = [(last - value) / (then - place)] * (then - place)


def _summary(keys: Sequence[_Key], samples: Sequence[_Sample]) -> tuple[Usage | None, list[Curve]]:
    if not samples:  # other jobs needed their place
        return None, []
    window = _Window(keys, samples)
    found: dict[str, Series] = {}
    for name, metric in _LEVELS.items():
        found[name] = {(key.node, key.gpu): line for key, line in window.levels(metric).items()}
    for name, metric in _SPEEDS.items():
        found[name] = {(key.node, ""): line for key, line in window.speeds(metric).items()}
    found |= _training(window)
    begin, seconds = samples[0].moment, samples[-1].moment - samples[0].moment
    usage = usage_of(found, seconds, window.step, _ranks(window))
    if usage is None:
        return None, []
    curves = curves_of(found, begin, window.step)
    if usage.training and 1 < usage.training.ranks <= MOST_RANKS:
        curves += rank_curves(_rank_shares(window), begin, window.step)
    return usage, curves


def _training(window: _Window) -> dict[str, Series]:
    """Of all ranks: they are one run."""
    speeds, levels = window.speeds, window.levels
    each: dict[str, tuple[dict[_Key, _Line], Callable[[list[float]], float]]] = {
        "ranks": (levels(_TRAINED), len),
        "steps": (speeds("carme_training_steps_total"), statistics.fmean),
        "samples": (speeds("carme_training_samples_total"), sum),
        "trained": (speeds(_TRAINED), statistics.fmean),
        "data_wait": (speeds(_WAITED, "data"), statistics.fmean),
        "rank_wait": (speeds(_WAITED, "ranks"), statistics.fmean),
        "loss": (levels("carme_training_loss"), statistics.fmean),
    }
    return {
        name: {("", ""): _combined(list(lines.values()), how)} if lines else {}
        for name, (lines, how) in each.items()
    }


def _combined(lines: list[_Line], how: Callable[[list[float]], float]) -> _Line:
    """One line of many, from the values that are known at each step."""
    at_step = ([value for value in values if value is not None] for values in zip(*lines, strict=True))
    return [float(how(known)) if known else None for known in at_step]


def _rank_shares(window: _Window) -> dict[str, Series]:
    """The share of its time for which each rank waited, by what it waited for."""
    trained = {(key.node, key.rank): line for key, line in window.speeds(_TRAINED).items()}
    return {
        part: {
            (key.node, key.rank): [
                waited / whole if waited is not None and whole else None
                for waited, whole in zip(line, trained[key.node, key.rank], strict=True)
            ]
            for key, line in window.speeds(_WAITED, part).items()
            if (key.node, key.rank) in trained
        }
        for part in ("data", "ranks")
    }


def _ranks(window: _Window) -> list[RankUse]:
    """What each rank reported last."""
    reported: dict[tuple[int, str], dict[str, float]] = {}
    for column, key in (pair for columns in window.columns.values() for pair in columns):
        if key.rank.isascii() and key.rank.isdecimal() and (known := window.values(column)):
            name = f"{key.name.removeprefix('carme_training_')}{key.cause}"
            reported.setdefault((int(key.rank), key.node), {})[name] = known[-1][1]
    return [rank_use(rank, node, sums) for (rank, node), sums in sorted(reported.items())]
