"""The names of all series that the exporters can serve, from real scrapes of both."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from carme.broker.overview import Overview
from carme.jobs import Cluster
from carme_monitoring.cluster.collector import ClusterCollector
from carme_monitoring.exposition import text
from carme_monitoring.gpus import GpuWatch
from carme_monitoring.jobs import Allocations, Cgroups, Training
from carme_monitoring.node.collector import NodeCollector

from .conftest import Starts


def exported(start: Starts, folder: Path) -> set[str]:
    """Names of samples: with `_total`, `_bucket`, `_sum` and `_count`."""
    gpus = folder / "gpus.txt"
    gpus.write_text(
        "gpu uuid=GPU-0 minor=0 util=50 used=1 total=4 power=300 energy=5 temp=60 tensor=40 xid=79\n"
    )
    exporter = start(gpus)
    exporter.text()
    return _names(exporter.text()) | _families(folder) | _cluster()


def _families(folder: Path) -> set[str]:
    """What the node exporter has series of only while a job runs."""
    registry = CollectorRegistry()
    training = Training(folder / "training", lambda process: None)
    registry.register(
        NodeCollector(GpuWatch([]), Cgroups(folder / "none"), Allocations(folder / "none"), training)
    )
    return _names(text(registry.collect()).decode())


def _cluster() -> set[str]:
    registry = CollectorRegistry()
    view = Overview(answered=datetime.now(UTC), cluster=Cluster(taken=datetime.now(UTC)))
    registry.register(ClusterCollector(lambda: view, dict))
    return _names(text(registry.collect()).decode())


def _names(written: str) -> set[str]:
    found = set()
    for family in text_string_to_metric_families(written):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(
            family.type, ("",)
        )
        found |= {family.name + suffix for suffix in suffixes}
    return found
