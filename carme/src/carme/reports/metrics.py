"""A job's usage from Prometheus."""

import asyncio
import math
import statistics
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from carme.reports.models import Curve, GpuUse, NodeUse, RankUse, TrainingUse, Usage
from carme.reports.prometheus import Prometheus
from carme.reports.record import MOST_RANKS

__all__ = [
    "POINTS",
    "SHORTEST_STEP",
    "Metrics",
    "Series",
    "curves_of",
    "is_usable",
    "rank_curves",
    "rank_use",
    "usage_of",
]

POINTS = 240  # of a curve
CURVE_POINTS = 120  # of a curve that is reported
SHORTEST_STEP = 15.0
WORKS = 0.05  # a GPU that is busy for less than that does nothing
#: Of a value. Jobs report their losses themselves, and sums of larger ones are more than a float holds.
LARGEST = 1e100

_QUERIES = {
    "busy": "carme_job_gpu_utilization_ratio{%s}",
    "gpu_memory": "carme_job_gpu_memory_used_bytes{%s}",
    "gpu_total": "carme_job_gpu_memory_total_bytes{%s}",
    "power": "carme_job_gpu_power_watts{%s}",
    "cpu": "sum by (node) (rate(carme_job_cpu_seconds_total{%s}[%ds]))",
    "cpus": "carme_job_cpus{%s}",
    "memory": "carme_job_memory_used_bytes{%s}",
    "peak": "carme_job_memory_peak_bytes{%s}",
    "limit": "carme_job_memory_limit_bytes{%s}",
    "read": "carme_job_io_read_bytes_total{%s}",
    "written": "carme_job_io_written_bytes_total{%s}",
    "received": "sum by (node) (rate(carme_job_network_receive_bytes_total{%s}[%ds]))",
    "sent": "sum by (node) (rate(carme_job_network_transmit_bytes_total{%s}[%ds]))",
    # Of all ranks: they are one run. Shares of the time in which they trained.
    "ranks": "count(carme_training_seconds_total{%s})",
    "steps": "avg(rate(carme_training_steps_total{%s}[%ds]))",
    "samples": "sum(rate(carme_training_samples_total{%s}[%ds]))",
    "trained": "avg(rate(carme_training_seconds_total{%s}[%ds]))",
    "data_wait": 'avg(rate(carme_training_wait_seconds_total{cause="data",%s}[%ds]))',
    "rank_wait": 'avg(rate(carme_training_wait_seconds_total{cause="ranks",%s}[%ds]))',
    "loss": "avg(carme_training_loss{%s})",
}

Series = dict[tuple[str, str], list[float | None]]  # by node and GPU ("" for what is the node's)


class Metrics:
    """The site's Prometheus.

    Args:
        url: Its address.
        certificates: The folder with `tls.pem` and `ca.crt` of a reader.
    """

    def __init__(self, url: str, certificates: Path) -> None:
        self._prometheus = Prometheus(url, certificates)

    async def usage(self, job_id: int, begin: datetime, end: datetime) -> tuple[Usage | None, list[Curve]]:
        """What the job used between two moments; None if nothing is known about that.

        Raises:
            CarmeError: Prometheus does not answer.
        """
        return await asyncio.to_thread(self._usage, job_id, begin.timestamp(), end.timestamp())

    def _usage(self, job_id: int, begin: float, end: float) -> tuple[Usage | None, list[Curve]]:
        step = max(SHORTEST_STEP, math.ceil((end - begin) / POINTS))
        selector = f'jobid="{job_id:d}"'
        found: dict[str, Series] = {}
        for name, query in _QUERIES.items():
            arguments = (selector, max(60, 4 * step)) if query.count("%") == 2 else (selector,)
            found[name] = self._range(query % arguments, begin, end, step)
        usage = usage_of(found, end - begin, step, self._ranks(selector, begin, end))
        if usage is None:
            return None, []
        curves = curves_of(found, begin, step)
        if usage.training and 1 < usage.training.ranks <= MOST_RANKS:
            curves += rank_curves(self._rank_shares(selector, begin, end, step), begin, step)
        return usage, curves

    def _rank_shares(self, selector: str, begin: float, end: float, step: float) -> dict[str, Series]:
        """The share of its time for which each rank waited, by what it waited for."""
        back = max(60, 4 * step)
        found: dict[str, Series] = {}
        for part in ("data", "ranks"):
            waited = f'carme_training_wait_seconds_total{{cause="{part}",{selector}}}'
            shares = " / ".join(
                f"sum by (node, rank) (rate({series}[{back}s]))"
                for series in (waited, f"carme_training_seconds_total{{{selector}}}")
            )
            found[part] = self._range(shares, begin, end, step, "rank")
        return found

    def _ranks(self, selector: str, begin: float, end: float) -> list[RankUse]:
        """What each rank reported last."""
        span = max(1, math.ceil(end - begin))
        query = f'last_over_time({{__name__=~"carme_training_.+",{selector}}}[{span}s])'
        answer = self._prometheus.ask("/api/v1/query", [("query", query), ("time", end)])
        reported: dict[tuple[int, str], dict[str, float]] = {}
        for series in answer["data"]["result"]:
            labels, value = series["metric"], float(series["value"][1])
            rank = str(labels.get("rank", ""))
            if rank.isascii() and rank.isdecimal() and is_usable(value):
                name = f"{labels['__name__'].removeprefix('carme_training_')}{labels.get('cause', '')}"
                reported.setdefault((int(rank), str(labels.get("node", ""))), {})[name] = value
        return [rank_use(rank, node, sums) for (rank, node), sums in sorted(reported.items())]

    def _range(self, query: str, begin: float, end: float, step: float, each: str = "gpu") -> Series:
        requested = [("query", query), ("start", begin), ("end", end), ("step", step)]
        answer = self._prometheus.ask("/api/v1/query_range", requested)
        count = int((end - begin) // step) + 1
        found: Series = {}
        for series in answer["data"]["result"]:
            labels = series["metric"]
            key = (str(labels.get("node", "")), str(labels.get(each, "")))
            values = found.setdefault(key, [None] * count)
            for moment, text in series["values"]:
                place = round((float(moment) - begin) / step)
                if 0 <= place < count and is_usable(value := float(text)):
                    values[place] = value
        return found


def is_usable(value: float) -> bool:
    """Whether a value of a metric is a number from which means can be made."""
    return abs(value) <= LARGEST  # not so NaN


def usage_of(found: dict[str, Series], seconds: float, step: float, each: list[RankUse]) -> Usage | None:
    """A job's usage; None where nothing was measured.

    Args:
        found: Series of all names in `_QUERIES`, with a value for each step.
        seconds: The time that they are about.
        step: Seconds.
        each: The job's ranks.
    """
    if not found["memory"] and not found["cpu"] and not found["busy"]:
        return None
    nodes = sorted({node for series in found.values() for node, _ in series if node})
    return Usage(
        seconds=seconds,
        nodes=[
            NodeUse(
                node=node,
                cpus=_last(found["cpus"].get((node, ""))),
                cpus_used=_mean(found["cpu"].get((node, ""))),
                memory_bytes=_most(found["peak"].get((node, "")) or found["memory"].get((node, ""))),
                memory_limit_bytes=_last(found["limit"].get((node, ""))),
                read_bytes=_most(found["read"].get((node, ""))),
                written_bytes=_most(found["written"].get((node, ""))),
            )
            for node in nodes
        ],
        gpus=[
            GpuUse(
                node=key[0],
                gpu=key[1],
                busy=_mean(values) or 0.0,
                active=_mean([None if value is None else float(value > WORKS) for value in values]) or 0.0,
                memory_bytes=_most(found["gpu_memory"].get(key)),
                memory_total_bytes=_last(found["gpu_total"].get(key)),
                energy_joules=_sum(found["power"].get(key), step),
            )
            for key, values in sorted(found["busy"].items())
        ],
        training=_training(found, each),
    )


def rank_curves(found: dict[str, Series], begin: float, step: float) -> list[Curve]:
    """The share of its time for which each rank waited.

    Args:
        found: By what it waited for (`data`, `ranks`), series by node and rank.
        begin: Of their first value, in seconds since 1970.
        step: Seconds from one value to the next.
    """
    every = _thinning(found)
    known = {(node, rank) for series in found.values() for node, rank in series}
    ranks = sorted((int(rank), node) for node, rank in known if rank.isascii() and rank.isdecimal())
    return [
        Curve(
            what="rank_wait",
            name=f"{node} rank {rank}",
            part=part,
            start=begin,
            step=step * every,
            values=[
                None if value is None else round(min(1.0, value), 3)
                for value in _downsample(found[part][node, str(rank)], every)
            ],
        )
        for rank, node in ranks
        for part in found
        if (node, str(rank)) in found[part]
    ]


def _job_line(found: dict[str, Series], name: str) -> list[float | None]:
    """A line that is neither a node's nor a GPU's."""
    return found[name].get(("", ""), [])


def rank_use(rank: int, node: str, sums: dict[str, float]) -> RankUse:
    """A rank, from its sums since its first step: `steps_total`, `wait_seconds_totaldata` and the like."""

    def of(name: str, whole: str, most: float = math.inf) -> float | None:
        return min(most, sums[name] / sums[whole]) if name in sums and sums.get(whole) else None

    return RankUse(
        node=node,
        rank=rank,
        step_seconds=of("seconds_total", "steps_total"),
        samples_per_second=of("samples_total", "seconds_total"),
        data_wait=of("wait_seconds_totaldata", "seconds_total", 1.0),
        rank_wait=of("wait_seconds_totalranks", "seconds_total", 1.0),
        loss=sums.get("loss"),
    )


def _training(found: dict[str, Series], each: list[RankUse]) -> TrainingUse | None:
    if not (ranks := _most(_job_line(found, "ranks"))):
        return None
    # The run may be shorter than what the rates look back: their ratio is right where each of them is not.
    trained, steps = _mean(_job_line(found, "trained")), _mean(_job_line(found, "steps"))
    # Where no speed is known yet, the ranks' own sums say how long their steps took.
    since_start = _mean([rank.step_seconds for rank in each])

    def share(name: str, most: float) -> float | None:
        part = _mean(_job_line(found, name))
        return min(most, part / trained) if part is not None and trained else None

    return TrainingUse(
        ranks=int(ranks),
        step_seconds=trained / steps if trained and steps else since_start,
        samples_per_second=share("samples", math.inf),
        data_wait=share("data_wait", 1.0),
        rank_wait=share("rank_wait", 1.0),
        loss=_last(_job_line(found, "loss")),
        each=each,
    )


def _training_curves(found: dict[str, Series], begin: float, step: float, every: int) -> Iterator[Curve]:
    for what, name, over in (
        ("wait", "for data", "data_wait"),
        ("wait", "for other ranks", "rank_wait"),
        ("steps", "mean of the ranks", "steps"),
        ("samples", "all ranks", "samples"),
        ("loss", "mean of the ranks", "loss"),
    ):
        known = _known(values := _job_line(found, over))
        if not known:
            continue
        top = None if what == "wait" else max(map(abs, known)) or 1.0
        thin = _downsample(values, every)
        yield Curve(
            what=what,
            name=name,
            start=begin,
            step=step * every,
            values=[None if value is None else round(value / (top or 1.0), 3) for value in thin],
            top=top,
        )


def curves_of(found: dict[str, Series], begin: float, step: float) -> list[Curve]:
    """All curves but those of single ranks; arguments as of `rank_curves`, series as of `usage_of`."""
    every = _thinning(found)
    curves = []
    for what, over, part in (
        ("gpu", "busy", None),
        ("gpu_memory", "gpu_memory", "gpu_total"),
        ("cpu", "cpu", "cpus"),
        ("memory", "memory", "limit"),
    ):
        for (node, gpu), values in sorted(found[over].items()):
            whole = _last(found[part].get((node, gpu))) if part else 1.0
            if not whole:
                continue
            thin = _downsample(values, every)
            curves.append(
                Curve(
                    what=what,
                    name=f"{node} GPU {gpu}" if gpu else node,
                    start=begin,
                    step=step * every,
                    values=[None if value is None else round(value / whole, 3) for value in thin],
                    whole=whole if part else None,
                )
            )
    curves += _io_curves(found, begin, step, every)
    curves += _network_curves(found, begin, step, every)
    return [*curves, *_training_curves(found, begin, step, every)]


def _io_curves(found: dict[str, Series], begin: float, step: float, every: int) -> Iterator[Curve]:
    """What each node read from disks and wrote to them in each second, of the most that any did."""
    rates: dict[str, list[float | None]] = {}
    for what in ("read", "written"):
        for (node, _gpu), values in sorted(found[what].items()):
            thin = values[::every]
            # A counter that goes down began anew.
            rates[f"{node} {what}"] = [
                None if last is None or value is None or value < last else (value - last) / (step * every)
                for last, value in pairwise(thin)
            ]
    yield from _flow_curves("io", rates, begin + step * every, step * every)


def _network_curves(found: dict[str, Series], begin: float, step: float, every: int) -> Iterator[Curve]:
    """What each node received from the network and sent in each second, where that is the job's alone."""
    rates = {
        f"{node} {what}": _downsample(values, every)
        for what in ("received", "sent")
        for (node, _gpu), values in sorted(found[what].items())
    }
    yield from _flow_curves("network", rates, begin, step * every)


def _flow_curves(
    what: str, rates: dict[str, list[float | None]], start: float, step: float
) -> Iterator[Curve]:
    """Bytes per second by name, of the most of them."""
    top = max((value for values in rates.values() for value in _known(values)), default=0.0) or 1.0
    for name, values in rates.items():
        shares = [None if value is None else round(value / top, 3) for value in values]
        yield Curve(what=what, name=name, start=start, step=step, values=shares, top=top)


def _thinning(found: dict[str, Series]) -> int:
    """How many values become one, so that a curve has at most CURVE_POINTS."""
    longest = max((len(values) for series in found.values() for values in series.values()), default=1)
    return max(1, math.ceil(longest / CURVE_POINTS))


def _downsample(values: list[float | None], every: int) -> list[float | None]:
    """The means of so many values each."""
    return [_mean(values[place : place + every]) for place in range(0, len(values), every)]


def _known(values: list[float | None] | None) -> list[float]:
    return [value for value in values or () if value is not None]


def _mean(values: list[float | None] | None) -> float | None:
    known = _known(values)
    return statistics.fmean(known) if known else None


def _most(values: list[float | None] | None) -> float | None:
    return max(_known(values), default=None)


def _last(values: list[float | None] | None) -> float | None:
    known = _known(values)
    return known[-1] if known else None


def _sum(values: list[float | None] | None, step: float) -> float | None:
    known = _known(values)
    return sum(known) * step if known else None
