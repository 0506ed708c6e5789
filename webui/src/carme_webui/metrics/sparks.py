"""What my jobs did in the last minutes, for the dashboard: small charts of GPUs, processors and memory."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.core.cache import cache
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from carme.reports.metrics import WORKS
from carme.reports.prometheus import Prometheus
from carme_webui.accounts.models import User
from carme_webui.metrics.charts import PERCENT, Chart, Line
from carme_webui.metrics.scope import Scope

__all__ = ["has_metrics", "sparks"]

MINUTES = 10  # over which the use of idle GPUs is averaged: a pause between two epochs is no idleness
SHOWN_MINUTES, STEP = 30, 30  # of the charts; the step in seconds
REMEMBERED = 15  # seconds, as often as Prometheus looks
RATE = "2m"  # over which work of processors is counted

_BUSY = "carme_job_gpu_utilization_ratio"
_MEAN_BUSY = f"(avg_over_time({_BUSY}[{MINUTES}m]) and {_BUSY})"  # of what is there now
#: What is queried of all jobs of a user in one request, by the value of the label `what`.
_PARTS = {
    "gpu": f"avg by (jobid) ({_BUSY})",
    "cpu": (f"sum by (jobid) (rate(carme_job_cpu_seconds_total[{RATE}])) / sum by (jobid) (carme_job_cpus)"),
    "memory": "sum by (jobid) (carme_job_memory_used_bytes) / sum by (jobid) (carme_job_memory_limit_bytes)",
    "gpus": f"count by (jobid) ({_BUSY})",
    "mean": f"avg by (jobid) ({_MEAN_BUSY})",
    "idle": f"count by (jobid) ({_MEAN_BUSY} <= {WORKS})",
}
_QUERY = " or ".join(f'label_replace({part}, "what", "{what}", "", "")' for what, part in _PARTS.items())

#: By job and part; the moments are the same for all.
_Measured = dict[int, dict[str, list[float | None]]]


def has_metrics() -> bool:
    """Whether the site measures."""
    return bool(settings.SITE.monitoring.prometheus)


def sparks(user: User) -> dict[str, Any]:
    """My jobs that are measured now, by number: charts, what to know of their GPUs, and the table's words.

    Raises:
        CarmeError: Prometheus does not answer.
    """
    key = f"sparks-{user.pk}"
    known: tuple[float, _Measured] | None = cache.get(key)
    if known is None:
        known = _measured(user.username)
        cache.set(key, known, REMEMBERED)
    start, measured = known
    table = {"title": _("As a table"), "time": _("Time")}
    return {
        str(number): {
            "charts": [chart.spec for chart in _charts(start, parts)],
            "words": _words(parts),
            "table": table,
        }
        for number, parts in measured.items()
    }


def _charts(start: float, parts: Mapping[str, Sequence[float | None]]) -> list[Chart]:
    titles = {"gpu": _("GPUs"), "cpu": _("Processors"), "memory": _("Memory")}
    return [
        Chart(title, "%", start, STEP, [Line(title, _percents(parts[what]))], most=PERCENT, spark=True)
        for what, title in titles.items()
        if what in parts
    ]


def _percents(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(PERCENT * min(1.0, value), 1) for value in values]


def _words(parts: Mapping[str, Sequence[float | None]]) -> str:
    """How busy the GPUs were in the last minutes, and how many did nothing; empty where all worked."""
    last = {what: parts.get(what, [None])[-1] for what in ("gpus", "mean", "idle")}
    if last["gpus"] is None or last["mean"] is None:
        return ""
    gpus, idle = int(last["gpus"]), int(last["idle"] or 0)
    if not idle:
        return ""  # the charts say it
    words = ngettext("%(n)d GPU, %(percent)d %% busy", "%(n)d GPUs, %(percent)d %% busy", gpus)
    reported = words % {"n": gpus, "percent": round(PERCENT * last["mean"])}
    if idle == gpus:
        return f"{reported}: {_('nothing ran on them')}"
    return f"{reported}: {ngettext('%d did nothing', '%d did nothing', idle) % idle}"


def _measured(user: str) -> tuple[float, _Measured]:
    """The first moment in seconds since 1970, and what was measured of each job of a user from then on."""
    site = settings.SITE.monitoring
    end = int(time.time()) // STEP * STEP
    start, count = end - 60 * SHOWN_MINUTES, 60 * SHOWN_MINUTES // STEP + 1
    question = [("query", Scope.of_user(user).query(_QUERY)), ("start", start), ("end", end), ("step", STEP)]
    answer = Prometheus(site.prometheus, site.portal_certificates).ask("/api/v1/query_range", question)
    found: _Measured = {}
    for series in answer["data"]["result"]:
        number, what = str(series["metric"].get("jobid", "")), series["metric"].get("what", "")
        if not (number.isascii() and number.isdecimal() and what in _PARTS):
            continue
        values = found.setdefault(int(number), {}).setdefault(what, [None] * count)
        for moment, text in series["values"]:
            place, value = round((float(moment) - start) / STEP), float(text)
            if 0 <= place < count and value == value:  # else it is not a number
                values[place] = value
    return float(start), {number: parts for number, parts in found.items() if _is_running(parts)}


def _is_running(parts: Mapping[str, Sequence[float | None]]) -> bool:
    """Whether a job was measured a moment ago: others are over."""
    return any(value is not None for values in parts.values() for value in values[-2:])
