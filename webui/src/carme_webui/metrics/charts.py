"""What was measured of jobs, as the charts that pages draw (`static/carme/charts.js`)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import fmean
from typing import Any

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from carme.reports import Advice, Curve, Report

__all__ = [
    "Chart",
    "Growth",
    "Line",
    "Multiples",
    "Part",
    "Place",
    "Placed",
    "Stack",
    "multiples_of",
    "of_report",
]

PERCENT = 100
MOST_ROUNDED = 1000  # below, amounts have three digits that count; from there on, all before the decimal mark
#: Pixels of a chart among many, and how many GPUs one chart shows so that their lines can be distinguished.
SMALL_HEIGHT = 72
MOST_LINES = 4
#: Units of bytes, the largest first.
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, and a value for each step; None where nothing was measured."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """Lines over time.

    Attributes:
        title: What they show.
        unit: Of the values; empty: they are bare numbers.
        start, step: The first moment in seconds since 1970, and the seconds between two of them.
        lines: At least one.
        limit: What was requested, or is there in all, in the same unit; None: there is no such amount.
        limit_name: Which of the two.
        most: The highest value that the axis shows; None: it follows from the values.
        spark: It is small, without axes, for a line of text or a row of others like it.
        height: In pixels; None: as high as charts are.
    """

    title: str
    unit: str
    start: float
    step: float
    lines: Sequence[Line]
    limit: float | None = None
    limit_name: str = ""
    most: float | None = None
    spark: bool = False
    height: int | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """All that the browser draws it from."""
        found: dict[str, Any] = {
            "title": self.title,
            "unit": self.unit,
            "start": self.start,
            "step": self.step,
            "series": [{"name": line.name, "values": list(line.values)} for line in self.lines],
            "most": self.most,
            "summary": self.summary,
        }
        if self.limit is not None:
            found["line"] = {"name": self.limit_name, "value": self.limit}
        if self.height is not None:
            found["height"] = self.height
        if self.spark:
            return found | {"spark": True, "now": self.now}
        return found | {"words": {"table": _("As a table"), "time": _("Time")}}

    @property
    def data(self) -> str:
        """The same as JSON."""
        return json.dumps(self.spec, separators=(",", ":"))

    @property
    def now(self) -> str:
        """The last value of the first line that was measured."""
        known = [value for value in self.lines[0].values if value is not None]
        return _amount(known[-1], self.unit) if known else "-"

    @property
    def summary(self) -> str:
        """What it shows in words, for readers who do not see it."""
        parts = []
        for line in self.lines:
            known = [value for value in line.values if value is not None]
            if known:
                words = {
                    "name": line.name,
                    "mean": _amount(fmean(known), self.unit),
                    "most": _amount(max(known), self.unit),
                }
                parts.append(_("%(name)s %(mean)s on average, at most %(most)s") % words)
        return "; ".join(parts) or _("nothing was measured")


def _amount(value: float, unit: str) -> str:
    """A value as the reader's language writes it, on one line with its unit; charts.js does the same."""
    digits = Decimal(f"{value:.3g}" if abs(value) < MOST_ROUNDED else f"{value:.0f}")
    return f"{number_format(digits, force_grouping=True)}\xa0{unit}".strip()


def _mean(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    return _amount(fmean(known), unit) if known else "-"


@dataclass(frozen=True)
class Part:
    """One part of each stack.

    Attributes:
        rest: It is what nobody has, and is drawn in grey.
        total: It is the whole that contains the other parts, and is drawn in grey behind them.
    """

    name: str
    values: Sequence[float]
    rest: bool = False
    total: bool = False


@dataclass(frozen=True)
class Stack:
    """Amounts side by side, each of the same parts one upon the other: a month's hours by member, say.

    Attributes:
        title: What they show.
        unit: Of the values.
        axis: What the labels are: months, days.
        labels: The names of the stacks, from left to right.
        parts: At least one, each with a value for each label.
        most: The highest value that the axis shows; None: it follows from the values.
        limit: What all parts together may be; None: there is no such amount.
        limit_name: What it is called.
        current: The place of the stack that is shown first and is in the summary, such as today's; the last
            one is -1.
    """

    title: str
    unit: str
    axis: str
    labels: Sequence[str]
    parts: Sequence[Part]
    most: float | None = None
    limit: float | None = None
    limit_name: str = ""
    current: int = -1

    @property
    def data(self) -> str:
        """All that the browser draws it from, as JSON."""
        spec: dict[str, Any] = {
            "title": self.title,
            "unit": self.unit,
            "labels": list(self.labels),
            "series": [
                {"name": part.name, "values": list(part.values)}
                | ({"rest": True} if part.rest or part.total else {})
                | ({"total": True} if part.total else {})
                for part in self.parts
            ],
            "most": self.most,
            "current": self.current % len(self.labels),
            "summary": self.summary,
            "words": {"table": _("As a table"), "time": self.axis},
        }
        if self.limit is not None:
            spec["line"] = {"name": self.limit_name, "value": self.limit}
        return json.dumps(spec, separators=(",", ":"))

    @property
    def summary(self) -> str:
        """The current stack in words, for readers who do not see it."""
        parts = [f"{part.name} {_amount(part.values[self.current], self.unit)}" for part in self.parts]
        return f"{self.labels[self.current]}: {', '.join(parts)}"


@dataclass(frozen=True)
class Place:
    """A place on the lower axis of a growth.

    Attributes:
        at: Where it is.
        label: What it is called.
        marks: What else it is of all places, such as the cheapest.
        is_chosen: It has a ring, and is shown first.
    """

    at: float
    label: str
    marks: Sequence[str] = ()
    is_chosen: bool = False


@dataclass(frozen=True)
class Growth:
    """A line over amounts with its band, and lines to compare it with; both axes double with each step.

    Attributes:
        title: What it shows.
        axis: What the amounts are.
        places: The smallest first, at least one.
        line: A value above 0 for each place.
        low, high: The band around it.
        references: What it is compared with: the ideal first.
    """

    title: str
    axis: str
    places: Sequence[Place]
    line: Line
    low: Line
    high: Line
    references: Sequence[Line] = ()

    @property
    def data(self) -> str:
        """All that the browser draws it from, as JSON."""
        lines = [(self.line, ""), (self.low, "edge"), (self.high, "edge")]
        lines += [(line, "other") for line in self.references]
        chosen = [number for number, place in enumerate(self.places) if place.is_chosen]
        spec = {
            "title": self.title,
            "unit": "",
            "at": [place.at for place in self.places],
            "labels": [_marked(place) for place in self.places],
            "marks": [
                {"place": number, "words": ", ".join(place.marks), "chosen": place.is_chosen}
                for number, place in enumerate(self.places)
                if place.marks or place.is_chosen
            ],
            "series": [
                {"name": line.name, "values": [_short(value) for value in line.values]}
                | ({"role": role} if role else {})
                for line, role in lines
            ],
            "current": chosen[0] if chosen else len(self.places) - 1,
            "summary": self.summary,
            "words": {"table": _("As a table"), "time": self.axis},
        }
        return json.dumps(spec, separators=(",", ":"))

    @property
    def summary(self) -> str:
        """It in words, for readers who do not see it."""
        known = zip(self.places, self.line.values, strict=True)
        return "; ".join(f"{_marked(place)}: {_amount(value or 0.0, '')}" for place, value in known)


def _marked(place: Place) -> str:
    return ", ".join([place.label, *place.marks, *([_("chosen")] if place.is_chosen else [])])


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


@dataclass(frozen=True)
class Multiples:
    """Small charts of the same kind and scale, one for each rank or GPU.

    Attributes:
        title: What they show.
        keys: The names of each chart's lines.
        charts: At least two.
    """

    title: str
    keys: Sequence[str]
    charts: Sequence[Chart]

    @property
    def means(self) -> list[tuple[str, list[str]]]:
        """Each chart's title, and the mean of each of its lines."""
        return [
            (chart.title, [_mean(line.values, chart.unit) for line in chart.lines]) for chart in self.charts
        ]


def multiples_of(report: Report) -> list[Multiples]:
    """Each rank of a job's training by itself, and each GPU if it has many."""
    found = []
    ranks = [curve for curve in report.curves if curve.what == "rank_wait"]
    if len({curve.name for curve in ranks}) > 1:
        names = {"data": _("for data"), "ranks": _("for other ranks")}
        charts = list(_each(ranks, names))
        found.append(Multiples(_("Waiting, rank by rank"), list(names.values()), charts))
    gpus = [curve for curve in report.curves if curve.what == "gpu"]
    if len(gpus) > MOST_LINES:
        found.append(Multiples(_("GPU utilization, GPU by GPU"), [_("busy")], list(_each(gpus, {}))))
    return found


def _each(curves: list[Curve], names: dict[str, str]) -> Iterator[Chart]:
    """A small chart in percent for each name of curves."""
    by_name: dict[str, list[Curve]] = {}
    for curve in curves:
        by_name.setdefault(curve.name, []).append(curve)
    for name, own in by_name.items():
        known = {curve.part: _scaled(curve, curve.what, PERCENT) for curve in own}
        lines = [Line(names.get(part, name), known.get(part, [])) for part in names or known]
        yield Chart(
            name, "%", own[0].start, own[0].step, lines, most=PERCENT, spark=True, height=SMALL_HEIGHT
        )


@dataclass(frozen=True)
class Placed:
    """A chart, and the advice that is about what it shows."""

    chart: Chart
    advice: Sequence[Advice]


#: Curves of amounts, not of shares: those in bytes per second, and numbers.
_FLOWS, _NUMBERS = ("io", "network"), ("steps", "samples", "loss")
#: Which advice belongs to which chart, by its topic.
_TOPICS = {"gpu": ("gpu",), "cpu": ("cpu",), "memory": ("memory",), "wait": ("loader", "balance")}


def of_report(report: Report) -> tuple[list[Placed], list[Advice]]:
    """The charts of a job's report with their advice, and the advice that belongs to none of them."""
    titles = {
        "gpu": _("GPU utilization"),
        "gpu_memory": _("GPU memory"),
        "cpu": _("Processors"),
        "memory": _("Memory"),
        "io": _("Disks: read and written"),
        "network": _("Network: received and sent"),
        "wait": _("Training: share of time that ranks waited"),
        "steps": _("Training: steps per second"),
        "samples": _("Training: samples per second"),
        "loss": _("Training: loss"),
    }
    found, left = [], list(report.advice)
    for what, title in titles.items():
        curves = [curve for curve in report.curves if curve.what == what]
        if curves:
            own = [each for each in left if each.topic in _TOPICS.get(what, ())]
            left = [each for each in left if each not in own]
            found.append(Placed(_chart(what, title, curves), own))
    return found, left


def _chart(what: str, title: str, curves: list[Curve]) -> Chart:
    """One chart of curves of the same kind, in the unit that users requested in."""
    wholes = {curve.whole for curve in curves}
    whole = wholes.pop() if len(wholes) == 1 else None
    if what in _NUMBERS:
        unit, factor, limit = "", None, None
    elif what in _FLOWS:
        divisor, name = _bytes(max(curve.top or 0.0 for curve in curves))
        unit, factor, limit = f"{name}/s", 1 / divisor, None
    elif whole and what == "cpu":
        unit, factor, limit = "", whole, whole
    elif whole:
        divisor, unit = _bytes(whole)
        factor = limit = whole / divisor
    else:  # shares, also of wholes that differ
        unit, factor, limit = "%", PERCENT, PERCENT if what in ("cpu", "memory") else None
    lines = [Line(curve.name, _scaled(curve, what, factor)) for curve in curves]
    most = PERCENT if unit == "%" else None
    name = _("Total") if what == "gpu_memory" else _("Requested")
    first = curves[0]
    most = None if limit is not None else most
    return Chart(title, unit, first.start, first.step, lines, limit, name, most)


def _scaled(curve: Curve, what: str, factor: float | None) -> list[float | None]:
    """A curve's shares in a chart's unit."""
    whole = (curve.top or 1.0) if what in (*_FLOWS, *_NUMBERS) else 1.0
    scale = whole * (1.0 if factor is None else factor)
    return [None if value is None else _short(value * scale) for value in curve.values]


def _bytes(most: float) -> tuple[int, str]:
    """The unit in which so many bytes are a small number."""
    return next((size, name) for size, name in _BYTES if most >= size or size == 1)
