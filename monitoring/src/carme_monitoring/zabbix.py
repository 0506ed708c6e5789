"""Zabbix' templates (7.0 and later), from one table. `python -m carme_monitoring.zabbix FILE` writes them.

Two templates: "Carme node" reads one node's exporter and discovers its GPUs; "Carme cluster" reads the
cluster exporter, discovers nodes and makes a host with the first template for each. Every exporter is queried
once in a round, by an HTTP agent item; all else is cut out of its answer by Zabbix' own Prometheus
preprocessing. Format: Zabbix documentation, "Templates" under "Configuration export/import".
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CLUSTER", "NODE", "main", "render"]

NODE, CLUSTER = "Carme node", "Carme cluster"
_TEMPLATES, _HOSTS = "Templates/Applications", "Carme nodes"
_COLOURS = ("1A7C11", "F63100", "2774A4", "A54F10", "FC6EA3", "6C59DC")


@dataclass(frozen=True)
class Alarm:
    """A trigger.

    Attributes:
        expression: Zabbix' own, with `{}` for the item.
        severity: Zabbix' name.
    """

    name: str
    expression: str
    severity: str = "AVERAGE"
    advice: str = ""


@dataclass(frozen=True)
class Figure:
    """One item.

    Attributes:
        key: Unique in its template; in a discovery with the macros that distinguish its things.
        pattern: Of the series, as Zabbix' Prometheus pattern.
        how: `value`, or a function over all series that fit.
        per_second: The counter's growth is reported instead of the counter.
        zero_if_none: That the exporter has no such series means 0; else the last value stays.
    """

    key: str
    name: str
    pattern: str
    units: str = ""
    how: str = "value"
    per_second: bool = False
    zero_if_none: bool = False
    alarm: Alarm | None = None


@dataclass(frozen=True)
class Discovery:
    """Things that a series names.

    Attributes:
        pattern: Of the series, one for each thing.
        macros: Zabbix' macros and the labels that they stand for.
        graphs: Titles, and the keys that they show.
    """

    key: str
    name: str
    pattern: str
    macros: dict[str, str]
    figures: list[Figure]
    graphs: dict[str, list[str]]
    makes_hosts: bool = False


@dataclass(frozen=True)
class Template:
    """One template.

    Attributes:
        url: The exporter's address, a default that hosts may change.
        missing: What it means that the exporter does not answer.
    """

    url: str
    missing: Alarm
    figures: list[Figure]
    discoveries: list[Discovery]
    graphs: dict[str, list[str]]


_GPU = '{gpu="{#GPU}",uuid="{#UUID}"}'


def _of_gpu(name: str, **more: str) -> str:
    labels = "".join(f',{label}="{value}"' for label, value in more.items())
    return f'carme_gpu_{name}{{uuid="{{#UUID}}"{labels}}}'


def _gpu(key: str, name: str, pattern: str, units: str = "", **more: Any) -> Figure:
    return Figure(f"carme.gpu.{key}[{{#UUID}}]", f"GPU {{#GPU}}: {name}", pattern, units, **more)


TABLE: dict[str, Template] = {
    NODE: Template(
        url="https://{HOST.CONN}:9750/metrics",
        missing=Alarm(
            "The exporter of {HOST.NAME} does not answer",
            "nodata({},5m)=1",
            "WARNING",
            "systemctl status carme-node-exporter there; port 9750 must be open to Zabbix.",
        ),
        figures=[
            Figure("carme.jobs", "Jobs on the node", "carme_job_info", how="count"),
            Figure(
                "carme.memory.used",
                "Memory that jobs use",
                "carme_job_memory_used_bytes",
                "B",
                how="sum",
                zero_if_none=True,
            ),
            Figure(
                "carme.cpu",
                "Processors that jobs use",
                "carme_job_cpu_seconds_total",
                how="sum",
                per_second=True,
                zero_if_none=True,
            ),
            Figure(
                "carme.oom",
                "Processes ended for want of memory",
                "carme_job_oom_kills_total",
                how="sum",
                zero_if_none=True,
            ),
            Figure(
                "carme.library",
                "GPU libraries that fail or hang",
                'carme_gpu_library_state{state=~"failed|hanging"}',
                how="sum",
                alarm=Alarm(
                    "The GPU library of {HOST.NAME} fails or hangs",
                    "min({},5m)>0",
                    "HIGH",
                    "See nvidia-smi and the kernel log; a driver updated under jobs needs a reboot.",
                ),
            ),
            Figure(
                "carme.pass",
                "Time of the exporter's pass",
                "carme_exporter_pass_seconds",
                "s",
                alarm=Alarm(
                    "The exporter of {HOST.NAME} is slow", "min({},10m)>5", "INFO", "See the node's load."
                ),
            ),
        ],
        discoveries=[
            Discovery(
                "carme.gpus",
                "GPUs",
                "carme_gpu_info",
                {"{#GPU}": "gpu", "{#UUID}": "uuid", "{#MODEL}": "model"},
                [
                    _gpu(
                        "up",
                        "answers",
                        _of_gpu("up"),
                        alarm=Alarm(
                            "GPU {#GPU} of {HOST.NAME} does not answer any more",
                            "last({})=0",
                            "HIGH",
                            "Drain the node, look for XID 79 in its kernel log, and reboot it.",
                        ),
                    ),
                    _gpu("utilization", "time in which it works", _of_gpu("utilization_ratio"), "%"),
                    _gpu("memory", "memory in use", _of_gpu("memory_used_bytes"), "B"),
                    _gpu("power", "power", _of_gpu("power_watts"), "W"),
                    _gpu(
                        "temperature",
                        "temperature",
                        _of_gpu("temperature_celsius", sensor="gpu"),
                        "°C",
                        alarm=Alarm(
                            "GPU {#GPU} of {HOST.NAME} is too hot",
                            "min({},5m)>{$CARME.GPU.HOT}",
                            "WARNING",
                            "See fans, air flow and the room's temperature.",
                        ),
                    ),
                    _gpu(
                        "xid",
                        "errors that the driver reported",
                        f"carme_gpu_xid_errors_total{_GPU}",
                        how="sum",
                        # The series begins with the first error, which is to be a change as well.
                        zero_if_none=True,
                        alarm=Alarm(
                            "The driver reports errors of GPU {#GPU} of {HOST.NAME}",
                            "change({})>0",
                            "AVERAGE",
                            "Look the XID up in NVIDIA's list; journalctl --dmesg has its number.",
                        ),
                    ),
                    _gpu(
                        "ecc",
                        "memory errors that were not corrected",
                        _of_gpu("ecc_errors_total", kind="uncorrected"),
                        alarm=Alarm(
                            "GPU {#GPU} of {HOST.NAME} has memory errors",
                            # Growth alone: after a reset, which is what helps, it begins at 0.
                            'changecount({},1h,"inc")>0',
                            "HIGH",
                            "Drain the node and reset the GPU.",
                        ),
                    ),
                ],
                {
                    "GPU {#GPU}: use": ["utilization"],
                    "GPU {#GPU}: power and temperature": ["power", "temperature"],
                    "GPU {#GPU}: memory": ["memory"],
                },
            ),
        ],
        graphs={"Jobs and processors": ["carme.jobs", "carme.cpu"], "Memory of jobs": ["carme.memory.used"]},
    ),
    CLUSTER: Template(
        url="https://127.0.0.1:9751/metrics",
        missing=Alarm(
            "The cluster exporter does not answer",
            "nodata({},5m)=1",
            "WARNING",
            "systemctl status carme-cluster-exporter.",
        ),
        figures=[
            Figure(
                "carme.slurm",
                "Slurm answers",
                "carme_slurm_up",
                alarm=Alarm(
                    "Slurm does not answer",
                    "max({},2m)=0",
                    "HIGH",
                    "scontrol ping; systemctl status slurmctld.",
                ),
            ),
            Figure("carme.cpus", "Processors", "carme_cluster_cpus"),
            Figure("carme.cpus.used", "Processors that jobs hold", "carme_cluster_cpus_allocated"),
            Figure("carme.gpus", "GPUs", "carme_cluster_gpus", how="sum"),
            Figure("carme.gpus.used", "GPUs that jobs hold", "carme_cluster_gpus_allocated", how="sum"),
            Figure("carme.jobs.running", "Running jobs", 'carme_queue_jobs{state="running"}', how="sum"),
            Figure("carme.jobs.pending", "Waiting jobs", 'carme_queue_jobs{state="pending"}', how="sum"),
        ],
        discoveries=[
            Discovery(
                "carme.nodes",
                "Nodes",
                "carme_node_available",
                {"{#NODE}": "node"},
                [
                    Figure(
                        "carme.node[{#NODE}]",
                        "Node {#NODE} takes jobs",
                        'carme_node_available{node="{#NODE}"}',
                        alarm=Alarm(
                            "Node {#NODE} takes no jobs",
                            "max({},10m)=0",
                            "WARNING",
                            "scontrol show node {#NODE} says why.",
                        ),
                    ),
                ],
                {},
                makes_hosts=True,
            ),
            Discovery(
                "carme.services",
                "Services",
                "carme_service_up",
                {"{#SERVICE}": "service"},
                [
                    Figure(
                        "carme.service[{#SERVICE}]",
                        "The {#SERVICE} answers",
                        'carme_service_up{service="{#SERVICE}"}',
                        alarm=Alarm(
                            "The {#SERVICE} does not answer",
                            "max({},2m)=0",
                            "HIGH",
                            "systemctl status carme-{#SERVICE}.",
                        ),
                    ),
                ],
                {},
            ),
        ],
        graphs={
            "GPUs": ["carme.gpus", "carme.gpus.used"],
            "Processors": ["carme.cpus", "carme.cpus.used"],
            "Jobs": ["carme.jobs.running", "carme.jobs.pending"],
        },
    ),
}


def render() -> dict[str, Any]:
    """What Zabbix imports."""
    return {
        "zabbix_export": {
            "version": "7.0",
            "template_groups": [{"uuid": _uuid("group", _TEMPLATES), "name": _TEMPLATES}],
            "host_groups": [{"uuid": _uuid("hosts", _HOSTS), "name": _HOSTS}],
            "templates": [_template(name, template) for name, template in TABLE.items()],
            "graphs": [
                _graph(name, title, keys)
                for name, template in TABLE.items()
                for title, keys in template.graphs.items()
            ],
        }
    }


def _template(name: str, template: Template) -> dict[str, Any]:
    macros = {
        "{$CARME.URL}": (template.url, "The exporter's address."),
        "{$CARME.CERTIFICATE}": ("", "Certificate below SSLCertLocation of zabbix_server.conf."),
        "{$CARME.KEY}": ("", "Its key below SSLKeyLocation."),
        "{$CARME.INTERVAL}": ("30s", "Time between two questions."),
        "{$CARME.GPU.HOT}": ("92", "Degrees Celsius above which a GPU is too hot."),
    }
    source = {
        "uuid": _uuid(name, "source"),
        "name": "The exporter's answer",
        "type": "HTTP_AGENT",
        "key": "carme.metrics",
        "delay": "{$CARME.INTERVAL}",
        "history": "0",
        "value_type": "TEXT",
        "trends": "0",
        "timeout": "10s",
        "url": "{$CARME.URL}",
        "verify_peer": "YES",
        "verify_host": "YES",
        "ssl_cert_file": "{$CARME.CERTIFICATE}",
        "ssl_key_file": "{$CARME.KEY}",
    }
    # Whether it answers is reported by an item that keeps its values: the answers themselves are not kept.
    always = "carme_exporter_pass_seconds" if name == NODE else "carme_slurm_up"
    answers = Figure("carme.answers", "The exporter answers", always, alarm=template.missing)
    return {
        "uuid": _uuid(name, "template"),
        "template": name,
        "name": name,
        "description": "Reads a Carme exporter; made by carme_monitoring.zabbix.",
        "groups": [{"name": _TEMPLATES}],
        "items": [source, *(_item(name, figure, "triggers") for figure in [answers, *template.figures])],
        "discovery_rules": [_rule(name, discovery) for discovery in template.discoveries],
        "macros": [
            {"macro": key, "value": value, "description": text} for key, (value, text) in macros.items()
        ],
    }


def _item(template: str, figure: Figure, triggers: str) -> dict[str, Any]:
    """An item or, with `trigger_prototypes`, an item prototype."""
    cut = [
        figure.pattern,
        "value" if figure.how == "value" else "function",
        "" if figure.how == "value" else figure.how,
    ]
    # A series that is not there now is no fault: a job has ended, a GPU does not report.
    otherwise = (
        {"error_handler": "CUSTOM_VALUE", "error_handler_params": "0"}
        if figure.zero_if_none
        else {"error_handler": "DISCARD_VALUE"}
    )
    steps: list[dict[str, Any]] = [{"type": "PROMETHEUS_PATTERN", "parameters": cut, **otherwise}]
    if figure.per_second:
        steps.append({"type": "CHANGE_PER_SECOND", "parameters": [""], "error_handler": "DISCARD_VALUE"})
    if figure.units == "%":
        steps.append({"type": "MULTIPLIER", "parameters": ["100"]})
    found: dict[str, Any] = {
        "uuid": _uuid(template, figure.key),
        "name": figure.name,
        "type": "DEPENDENT",
        "key": figure.key,
        "delay": "0",
        "value_type": "FLOAT",
        "history": "31d",
        "units": figure.units,
        "preprocessing": steps,
        "master_item": {"key": "carme.metrics"},
    }
    if figure.alarm:
        place = f"/{template}/{figure.key}"
        found[triggers] = [
            {
                "uuid": _uuid(template, figure.key, "trigger"),
                "expression": figure.alarm.expression.replace("{}", place),
                "name": figure.alarm.name,
                "priority": figure.alarm.severity,
                "description": figure.alarm.advice,
            }
        ]
    return found


def _rule(template: str, discovery: Discovery) -> dict[str, Any]:
    by_end = {figure.key.partition("[")[0].rpartition(".")[2]: figure.key for figure in discovery.figures}
    found: dict[str, Any] = {
        "uuid": _uuid(template, discovery.key),
        "name": discovery.name,
        "type": "DEPENDENT",
        "key": discovery.key,
        "delay": "0",
        "lifetime": "7d",
        "item_prototypes": [_item(template, figure, "trigger_prototypes") for figure in discovery.figures],
        "graph_prototypes": [
            _graph(template, title, [by_end[end] for end in ends]) for title, ends in discovery.graphs.items()
        ],
        "master_item": {"key": "carme.metrics"},
        "lld_macro_paths": [
            {"lld_macro": macro, "path": f"$.labels['{label}']"} for macro, label in discovery.macros.items()
        ],
        "preprocessing": [{"type": "PROMETHEUS_TO_JSON", "parameters": [discovery.pattern]}],
    }
    if discovery.makes_hosts:
        found["host_prototypes"] = [
            {
                "uuid": _uuid(template, discovery.key, "host"),
                "host": "carme-{#NODE}",
                "name": "Carme node {#NODE}",
                "group_links": [{"group": {"name": _HOSTS}}],
                "templates": [{"name": NODE}],
                "macros": [{"macro": "{$CARME.URL}", "value": "https://{#NODE}:9750/metrics"}],
            }
        ]
    return found


def _graph(template: str, title: str, keys: list[str]) -> dict[str, Any]:
    return {
        "uuid": _uuid(template, title, "graph"),
        "name": title,
        "graph_items": [
            {"sortorder": str(place), "color": colour, "item": {"host": template, "key": key}}
            for place, (key, colour) in enumerate(zip(keys, _COLOURS, strict=False))
        ],
    }


def _uuid(*parts: str) -> str:
    """One that stays the same, so that a new version changes what is there; Zabbix takes version 4 alone."""
    digits = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return f"{digits[:12]}4{digits[13:16]}a{digits[17:]}"


def main(file: Path) -> bool:
    """Write the templates; whether the file changed."""
    text = json.dumps(render(), indent=2, ensure_ascii=False) + "\n"
    if file.exists() and file.read_text() == text:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return True


if __name__ == "__main__":
    if main(Path(sys.argv[1])):
        print(sys.argv[1])
