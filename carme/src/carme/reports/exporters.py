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
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from carme.errors import CarmeError
from carme.jobs import Job
from carme.jobs.nodes import expand
from carme.reports.metrics import SHORTEST_STEP, Series, curves_of, rank_curves, rank_use, usage_of
from carme.reports.models import Curve, RankUse, Usage
from carme.reports.prometheus import connection
from carme.reports.record import MOST_RANKS
from carme.translation import message as _

__all__ = ["Exporters"]

PATIENCE = 3.0  # seconds for one node
LEAST_SECONDS = 10.0  # between two looks at a job
FORGOTTEN_SECONDS = 900.0  # after the last look at it
MOST_JOBS, MOST_NODES, MOST_LOOKS = 256, 32, 480
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


class _Look(NamedTuple):
    """What the exporters served at a moment, in seconds since 1970."""

    moment: float
    values: dict[_Key, float]


class _Followed:
    """A job that somebody looks at."""

    def __init__(self) -> None:
        self.looks: deque[_Look] = deque(maxlen=MOST_LOOKS)
        self.wanted = 0.0
        self.lock = asyncio.Lock()


class Exporters:
    """The exporters of the site's nodes, each at its node's name.

    Args:
        port: Where they listen.
        certificates: The folder with `tls.pem` and `ca.crt` of a reader; without it nothing is known.
        clock: Seconds since 1970.
    """

    def __init__(self, port: int, certificates: Path, clock: Callable[[], float] = time.time) -> None:
        self._port, self._certificates, self._clock = port, certificates, clock
        self._followed: dict[int, _Followed] = {}

    @property
    def exist(self) -> bool:
        """Whether the site has made certificates for their readers."""
        return (self._certificates / "tls.pem").exists()

    async def usage(self, job: Job) -> tuple[Usage | None, list[Curve]]:
        """What a running job used since somebody began to look; None if nothing is known about that.

        Raises:
            CarmeError: No exporter answers.
        """
        now = self._clock()
        for number, known in list(self._followed.items()):
            if now - known.wanted > FORGOTTEN_SECONDS:
                del self._followed[number]
        followed = self._followed.setdefault(job.id, _Followed())
        followed.wanted = now
        while len(self._followed) > MOST_JOBS:
            del self._followed[min(self._followed, key=lambda number: self._followed[number].wanted)]
        async with followed.lock:
            if job.started and followed.looks and followed.looks[0].moment < job.started.timestamp():
                followed.looks.clear()  # of an earlier job of the number
            if not followed.looks or now - followed.looks[-1].moment >= LEAST_SECONDS:
                followed.looks.append(_Look(now, await self._look(job)))
            return _summary(list(followed.looks))

    async def _look(self, job: Job) -> dict[_Key, float]:
        nodes = expand(job.node_list)[:MOST_NODES]
        answers = await asyncio.gather(
            *(asyncio.to_thread(self._ask, node, job.id) for node in nodes), return_exceptions=True
        )
        found: dict[_Key, float] = {}
        failures: list[BaseException] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, (OSError, http.client.HTTPException, ValueError)):
                    raise answer
                failures.append(answer)
            else:
                found |= answer
        if failures and len(failures) == len(answers):
            why = getattr(failures[0], "strerror", None) or failures[0]
            raise CarmeError(
                _("The exporters of the job's nodes do not answer: {why}.", why=str(why)),
                _(
                    "Try again in a moment; an administrator finds the cause with 'systemctl status "
                    "carme-node-exporter' on the node."
                ),
                code="metrics",
            )
        return found

    def _ask(self, node: str, job_id: int) -> dict[_Key, float]:
        """A job's series on a node. Raises OSError, HTTPException, ValueError."""
        address = urlsplit(f"https://{node}:{self._port}")
        opened = connection(address, self._certificates, PATIENCE)
        try:
            opened.request("GET", "/metrics")
            response = opened.getresponse()
            body = response.read(MOST_BYTES)
        finally:
            opened.close()
        if response.status != http.client.OK:
            raise ValueError(f"it answered with status {response.status}")
        return _series(body.decode("utf-8", "replace"), node, job_id)


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
        if known.get("jobid") != str(job_id) or not math.isfinite(number := float(value)):
            continue
        key = _Key(name, node, *(known.get(label, "") for label in ("gpu", "rank", "cause")))
        found[key] = found.get(key, 0.0) + number
    return found


class _Window:
    """Looks at one job, brought to equal steps.

    Attributes:
        count: Values of each line.
        looks: By the places of their steps.
    """

    def __init__(self, looks: Sequence[_Look]) -> None:
        begin = looks[0].moment
        at_place = {round((look.moment - begin) / SHORTEST_STEP): look for look in looks}
        self.looks = sorted(at_place.items())
        self.count = self.looks[-1][0] + 1

    def levels(self, name: str) -> dict[_Key, _Line]:
        """A metric's values, straight lines between two looks."""
        return self._lines(name, _level)

    def speeds(self, name: str, cause: str = "") -> dict[_Key, _Line]:
        """How much a metric that only grows grew in each second."""
        lines = self._lines(name, _speed)
        return {key: line for key, line in lines.items() if key.cause == cause}

    def _lines(
        self, name: str, between: Callable[[_Line, int, float, int, float], None]
    ) -> dict[_Key, _Line]:
        points: dict[_Key, list[tuple[int, float]]] = {}
        for place, look in self.looks:
            for key, value in look.values.items():
                if key.name == name:
                    points.setdefault(key, []).append((place, value))
        found = {}
        for key, known in points.items():
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
        line[place + 1 : then + 1] = [(last - value) / ((then - place) * SHORTEST_STEP)] * (then - place)


def _summary(looks: Sequence[_Look]) -> tuple[Usage | None, list[Curve]]:
    window = _Window(looks)
    found: dict[str, Series] = {}
    for name, metric in _LEVELS.items():
        found[name] = {(key.node, key.gpu): line for key, line in window.levels(metric).items()}
    for name, metric in _SPEEDS.items():
        found[name] = {(key.node, ""): line for key, line in window.speeds(metric).items()}
    found |= _training(window)
    begin, seconds = looks[0].moment, looks[-1].moment - looks[0].moment
    usage = usage_of(found, seconds, SHORTEST_STEP, _ranks(looks))
    if usage is None:
        return None, []
    curves = curves_of(found, begin, SHORTEST_STEP)
    if usage.training and 1 < usage.training.ranks <= MOST_RANKS:
        curves += rank_curves(_rank_shares(window), begin, SHORTEST_STEP)
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


def _ranks(looks: Sequence[_Look]) -> list[RankUse]:
    """What each rank reported last."""
    reported: dict[tuple[int, str], dict[str, float]] = {}
    for look in looks:
        for key, value in look.values.items():
            if key.rank.isascii() and key.rank.isdecimal():
                name = f"{key.name.removeprefix('carme_training_')}{key.cause}"
                reported.setdefault((int(key.rank), key.node), {})[name] = value
    return [rank_use(rank, node, sums) for (rank, node), sums in sorted(reported.items())]
