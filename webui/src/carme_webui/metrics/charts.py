"""What was measured of jobs, as the charts that pages draw (`static/carme/charts.js`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from django.utils.translation import gettext as _

from carme.reports import Curve, Report

__all__ = ["Chart", "Line", "of_report"]

PERCENT = 100
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
        spark: It is small and stands in a line of text.
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
        return self._amount(known[-1]) if known else "-"

    @property
    def summary(self) -> str:
        """What it shows in words, for who does not see it."""
        parts = []
        for line in self.lines:
            known = [value for value in line.values if value is not None]
            if known:
                words = {
                    "name": line.name,
                    "mean": self._amount(fmean(known)),
                    "most": self._amount(max(known)),
                }
                parts.append(_("%(name)s %(mean)s on average, at most %(most)s") % words)
        return "; ".join(parts) or _("nothing was measured")

    def _amount(self, value: float) -> str:
        return f"{value:.3g} {self.unit}".strip() if abs(value) < 1000 else f"{value:.0f} {self.unit}".strip()


def of_report(report: Report) -> list[Chart]:
    """The charts of a job's report."""
    titles = {
        "gpu": _("GPU utilization"),
        "gpu_memory": _("GPU memory"),
        "cpu": _("Processors"),
        "memory": _("Memory"),
        "io": _("Disks: read and written"),
        "wait": _("Training: share of time that ranks waited"),
        "samples": _("Training: samples per second"),
        "loss": _("Training: loss"),
    }
    found = []
    for what, title in titles.items():
        curves = [curve for curve in report.curves if curve.what == what]
        if curves:
            found.append(_chart(what, title, curves))
    return found


def _chart(what: str, title: str, curves: list[Curve]) -> Chart:
    """One chart of curves of the same kind, in the unit that users requested in."""
    wholes = {curve.whole for curve in curves}
    whole = wholes.pop() if len(wholes) == 1 else None
    if what in ("samples", "loss"):
        unit, factor, limit = "", None, None
    elif what == "io":
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
    whole = (curve.top or 1.0) if what in ("io", "samples", "loss") else 1.0
    scale = whole * (1.0 if factor is None else factor)
    return [None if value is None else float(f"{value * scale:.4g}") for value in curve.values]


def _bytes(most: float) -> tuple[int, str]:
    """The unit in which so many bytes are a small number."""
    return next((size, name) for size, name in _BYTES if most >= size or size == 1)
