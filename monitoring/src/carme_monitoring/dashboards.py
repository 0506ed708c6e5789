"""Grafana's dashboards, made from one table. `python -m carme_monitoring.dashboards FOLDER` writes them.

The format is Grafana's dashboard JSON model. Every panel asks Prometheus, whose data source one chooses on
the dashboard itself. Boards of one node, job or user are reached from the others by their variable.
"""

import copy
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["BOARDS", "Board", "Panel", "main", "render"]

WIDTH = 24  # of Grafana's grid
HEIGHT = 8


@dataclass(frozen=True)
class Panel:
    """One graph or number.

    Attributes:
        queries: PromQL, and what its lines are called; `$variable` as in Grafana.
        unit: Grafana's name of a unit.
        kind: Grafana's name of the panel's kind.
        width: Of 24 columns.
        stacked: Lines are added up.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False


@dataclass(frozen=True)
class Board:
    """One dashboard; `variables` are label values to choose from, by name, as PromQL's `label_values`."""

    title: str
    panels: list[Panel]
    variables: dict[str, str] = field(default_factory=dict)


_SHARE = "percentunit"


def _quantile(share: float, histogram: str) -> str:
    """That share of what the histogram counted within an hour was at most so large."""
    return f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket[1h])))"


def _rate(name: str, matcher: str) -> str:
    """Growth in each second of what is there now: what has ended would show for two minutes more."""
    series = f"{name}{{{matcher}}}"
    return f"(rate({series}[2m]) and {series})"


_JOB = 'jobid="$jobid"'
_NODE = 'node="$node"'
_USER = 'user="$user"'
_ACCOUNT = 'account="$account"'
_ACCOUNT_GPU = f"carme_job_gpu_utilization_ratio{{{_ACCOUNT}}}"

BOARDS: dict[str, Board] = {
    "carme-cluster": Board(
        "Carme: cluster",
        [
            Panel(
                "GPUs in use",
                {"sum(carme_cluster_gpus_allocated) / sum(carme_cluster_gpus)": ""},
                _SHARE,
                "stat",
                6,
            ),
            Panel(
                "Processors in use",
                {"carme_cluster_cpus_allocated / carme_cluster_cpus": ""},
                _SHARE,
                "stat",
                6,
            ),
            Panel("Waiting jobs", {'sum(carme_queue_jobs{state="pending"})': ""}, kind="stat", width=6),
            Panel("Services that answer", {"carme_service_up": "{{service}}"}, kind="stat", width=6),
            Panel(
                "GPUs by type",
                {
                    "carme_cluster_gpus_allocated": "{{gpu_type}} in use",
                    "carme_cluster_gpus_usable": "{{gpu_type}} usable",
                },
            ),
            Panel(
                "What allotted GPUs do",
                {
                    "avg(carme_job_gpu_utilization_ratio)": "busy",
                    'avg(carme_job_gpu_activity_ratio{unit="tensor"})': "tensor cores",
                },
                _SHARE,
            ),
            Panel("Jobs by state", {"sum by (state) (carme_queue_jobs)": "{{state}}"}, stacked=True),
            Panel(
                "Why jobs wait", {"sum by (reason) (carme_queue_pending_jobs)": "{{reason}}"}, stacked=True
            ),
            Panel(
                "Waits of jobs that started",
                {
                    _quantile(0.5, "carme_queue_wait_seconds"): "half",
                    _quantile(0.9, "carme_queue_wait_seconds"): "nine in ten",
                },
                "s",
            ),
            Panel(
                "Starts of sessions, from nodes to open address",
                {
                    _quantile(0.5, "carme_session_start_seconds"): "half",
                    _quantile(0.9, "carme_session_start_seconds"): "nine in ten",
                },
                "s",
            ),
            Panel("GPUs by account", {"sum by (account) (carme_account_gpus)": "{{account}}"}, stacked=True),
            Panel("GPUs by user", {"topk(20, sum by (user) (carme_user_gpus))": "{{user}}"}, stacked=True),
            Panel("Nodes by state", {"carme_nodes": "{{state}}"}, stacked=True),
            Panel("Power of all GPUs", {"sum(carme_gpu_power_watts)": "all"}, "watt"),
        ],
    ),
    "carme-node": Board(
        "Carme: node",
        [
            Panel("GPUs busy", {f"carme_gpu_utilization_ratio{{{_NODE}}}": "GPU {{gpu}}"}, _SHARE),
            Panel(
                "GPUs' memory",
                {f"carme_gpu_memory_used_bytes{{{_NODE}}} / carme_gpu_memory_total_bytes": "GPU {{gpu}}"},
                _SHARE,
            ),
            Panel(
                "Temperature",
                {f'carme_gpu_temperature_celsius{{{_NODE},sensor="gpu"}}': "GPU {{gpu}}"},
                "celsius",
            ),
            Panel("Power", {f"carme_gpu_power_watts{{{_NODE}}}": "GPU {{gpu}}"}, "watt", stacked=True),
            Panel(
                "Slowed down",
                {f"carme_gpu_throttled{{{_NODE}}} == 1": "GPU {{gpu}}: {{reason}}"},
            ),
            Panel(
                "Errors",
                {
                    f"increase(carme_gpu_xid_errors_total{{{_NODE}}}[1h])": "GPU {{gpu}} XID {{xid}}",
                    f"increase(carme_gpu_ecc_errors_total{{{_NODE}}}[1h])": "GPU {{gpu}} {{kind}}",
                },
            ),
            Panel(
                "Processors by job",
                {
                    f"sum by (jobid, user) {_rate('carme_job_cpu_seconds_total', _NODE)}": (
                        "{{jobid}} {{user}}"
                    )
                },
                stacked=True,
            ),
            Panel(
                "Memory by job",
                {f"carme_job_memory_used_bytes{{{_NODE}}}": "{{jobid}} {{user}}"},
                "bytes",
                stacked=True,
            ),
        ],
        {"node": "label_values(carme_exporter_pass_seconds, node)"},
    ),
    "carme-job": Board(
        "Carme: job",
        [
            Panel(
                "GPUs busy", {f"carme_job_gpu_utilization_ratio{{{_JOB}}}": "{{node}} GPU {{gpu}}"}, _SHARE
            ),
            Panel(
                "Tensor cores",
                {f'carme_job_gpu_activity_ratio{{{_JOB},unit="tensor"}}': "{{node}} GPU {{gpu}}"},
                _SHARE,
            ),
            Panel(
                "GPUs' memory",
                {
                    f"carme_job_gpu_memory_used_bytes{{{_JOB}}} / carme_job_gpu_memory_total_bytes": (
                        "{{node}} GPU {{gpu}}"
                    )
                },
                _SHARE,
            ),
            Panel(
                "Power",
                {f"carme_job_gpu_power_watts{{{_JOB}}}": "{{node}} GPU {{gpu}}"},
                "watt",
                stacked=True,
            ),
            Panel(
                "Processors",
                {
                    f"sum by (node) {_rate('carme_job_cpu_seconds_total', _JOB)}": "{{node}} used",
                    f"carme_job_cpus{{{_JOB}}}": "{{node}} allotted",
                },
            ),
            Panel(
                "Memory",
                {
                    f"carme_job_memory_used_bytes{{{_JOB}}}": "{{node}} used",
                    f"carme_job_memory_limit_bytes{{{_JOB}}}": "{{node}} allotted",
                },
                "bytes",
            ),
            Panel(
                "Disks",
                {
                    _rate("carme_job_io_read_bytes_total", _JOB): "{{node}} read",
                    _rate("carme_job_io_written_bytes_total", _JOB): "{{node}} written",
                },
                "Bps",
            ),
            Panel("Threads", {f"carme_job_threads{{{_JOB}}}": "{{node}}"}),
            Panel(
                "Training: share of time for which ranks waited",
                {
                    f"{_rate('carme_training_wait_seconds_total', _JOB)} / ignoring (cause) group_left () "
                    f"{_rate('carme_training_seconds_total', _JOB)}": "rank {{rank}} for {{cause}}"
                },
                _SHARE,
            ),
            Panel(
                "Training: samples in each second",
                {_rate("carme_training_samples_total", _JOB): "rank {{rank}}"},
                stacked=True,
            ),
            Panel(
                "Training: time of a step",
                {
                    f"{_rate('carme_training_seconds_total', _JOB)} / "
                    f"{_rate('carme_training_steps_total', _JOB)}": "rank {{rank}}"
                },
                "s",
            ),
            Panel("Training: loss", {f"carme_training_loss{{{_JOB}}}": "rank {{rank}}"}),
        ],
        {"jobid": "label_values(carme_job_info, jobid)"},
    ),
    "carme-user": Board(
        "Carme: user",
        [
            Panel("GPUs held", {f"carme_user_gpus{{{_USER}}}": "{{gpu_type}}"}, stacked=True),
            Panel(
                "Jobs",
                {
                    f"carme_user_running_jobs{{{_USER}}}": "running",
                    f"carme_user_pending_jobs{{{_USER}}}": "waiting",
                },
            ),
            Panel(
                "GPUs busy, by job",
                {f"avg by (jobid) (carme_job_gpu_utilization_ratio{{{_USER}}})": "{{jobid}}"},
                _SHARE,
            ),
            Panel(
                "Processors used, of those allotted",
                {
                    f"sum by (jobid) {_rate('carme_job_cpu_seconds_total', _USER)} / "
                    f"sum by (jobid) (carme_job_cpus{{{_USER}}})": "{{jobid}}"
                },
                _SHARE,
            ),
            Panel(
                "Memory used, of that allotted",
                {
                    f"sum by (jobid) (carme_job_memory_used_bytes{{{_USER}}}) / "
                    f"sum by (jobid) (carme_job_memory_limit_bytes{{{_USER}}})": "{{jobid}}"
                },
                _SHARE,
            ),
            Panel(
                "Power",
                {f"sum by (jobid) (carme_job_gpu_power_watts{{{_USER}}})": "{{jobid}}"},
                "watt",
                stacked=True,
            ),
        ],
        {"user": "label_values(carme_job_info, user)"},
    ),
    "carme-project": Board(
        "Carme: project",
        [
            Panel(
                "GPUs held, by user",
                {f"count by (user) (carme_job_gpu_utilization_ratio{{{_ACCOUNT}}})": "{{user}}"},
                stacked=True,
            ),
            Panel(
                "Running jobs, by user",
                {f"count by (user) (group by (jobid, user) (carme_job_info{{{_ACCOUNT}}}))": "{{user}}"},
                stacked=True,
            ),
            Panel(
                "GPUs busy, by user",
                {f"avg by (user) (carme_job_gpu_utilization_ratio{{{_ACCOUNT}}})": "{{user}}"},
                _SHARE,
            ),
            Panel(
                "GPUs that did nothing for a quarter of an hour, by job",
                {
                    "sum by (jobid, user) "
                    f"((max_over_time({_ACCOUNT_GPU}[15m]) and {_ACCOUNT_GPU} and {_ACCOUNT_GPU} offset 15m)"
                    " <bool 0.05)": "{{jobid}} {{user}}"
                },
                stacked=True,
            ),
            Panel(
                "Processors used, of those allotted",
                {
                    f"sum by (user) {_rate('carme_job_cpu_seconds_total', _ACCOUNT)} / "
                    f"sum by (user) (carme_job_cpus{{{_ACCOUNT}}})": "{{user}}"
                },
                _SHARE,
            ),
            Panel(
                "Memory used, of that allotted",
                {
                    f"sum by (user) (carme_job_memory_used_bytes{{{_ACCOUNT}}}) / "
                    f"sum by (user) (carme_job_memory_limit_bytes{{{_ACCOUNT}}})": "{{user}}"
                },
                _SHARE,
            ),
            Panel(
                "Power of GPUs",
                {f"sum by (user) (carme_job_gpu_power_watts{{{_ACCOUNT}}})": "{{user}}"},
                "watt",
                stacked=True,
            ),
            Panel(
                "Training: share of time for which ranks waited, by job",
                {
                    f"sum by (jobid, cause) {_rate('carme_training_wait_seconds_total', _ACCOUNT)} "
                    "/ ignoring (cause) group_left "
                    f"sum by (jobid) {_rate('carme_training_seconds_total', _ACCOUNT)}": (
                        "{{jobid}} for {{cause}}"
                    )
                },
                _SHARE,
            ),
        ],
        {"account": "label_values(carme_job_info, account)"},
    ),
}

# All that Grafana's schema asks for, so that no release fills in what it likes.
_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "graphMode": "none",
        "colorMode": "value",
        "justifyMode": "auto",
        "textMode": "auto",
        "orientation": "auto",
    },
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}

_SOURCE = {"type": "prometheus", "uid": "${source}"}


def render(uid: str, board: Board) -> dict[str, Any]:
    """One dashboard as Grafana reads it; it is the caller's own and may be changed."""
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": board.title,
        "tags": ["carme"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "links": [
            {"type": "dashboards", "tags": ["carme"], "asDropdown": False, "keepTime": True, "title": "Carme"}
        ],
        "templating": {"list": [source, *(_variable(*pair) for pair in board.variables.items())]},
        "annotations": {"list": []},
        "panels": _panels(board.panels),
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": dict(_SOURCE),
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes: jobs come and go
        "sort": 3,
        "multi": False,
        "includeAll": False,
    }


def _panels(panels: list[Panel]) -> list[dict[str, Any]]:
    found, left, top, row = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        height = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
        if left + panel.width > WIDTH:
            left, top, row = 0, top + row, 0
        place = {"x": left, "y": top, "w": panel.width, "h": height}
        left, row = left + panel.width, max(row, height)
        found.append(_panel(number, panel, place))
    return found


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"stacking": stacking, "fillOpacity": 20 if panel.stacked else 0}
    # A number is of now: over a range of time it would be the last one of that, however old.
    moment = {"instant": True, "range": False} if panel.kind == "stat" else {}
    return {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": dict(_SOURCE),
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": copy.deepcopy(_OPTIONS[panel.kind]),
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": dict(_SOURCE),
                "expr": expression,
                "legendFormat": legend or "__auto",
                **moment,
            }
            for place, (expression, legend) in enumerate(panel.queries.items())
        ],
    }


def main(folder: Path) -> list[str]:
    """Write all dashboards; the names of those that changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for uid, board in BOARDS.items():
        file, text = folder / f"{uid}.json", json.dumps(render(uid, board), indent=2) + "\n"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
            changed.append(file.name)
    return changed


if __name__ == "__main__":
    for name in main(Path(sys.argv[1])):
        print(name)
