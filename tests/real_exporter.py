"""A real exporter's server by mutual TLS, with measurements of a job that a test decides."""

import grp
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from carme.jobs import Job, JobState
from carme.reports.exporters import Exporters
from carme_monitoring.certificates import make
from carme_monitoring.serving import MetricsServer

GIB = 1 << 30
NODE = "localhost"
ELSEWHERE = "gpu-01"  # a node whose name leads nowhere: Slurm has an address for it
JOB_LABELS = {"jobid": "7", "user": "ada"}


class Node(Collector):
    """What a node's exporter knows of two jobs, `seconds` after their start."""

    seconds = 0.0
    trains = True

    def collect(self) -> Iterator[Metric]:
        """One sample of each series."""
        for name, value, labels in self.samples():
            counted = name.endswith("_total")
            family = CounterMetricFamily if counted else GaugeMetricFamily
            metric = family(name.removesuffix("_total"), "x", labels=list(labels))
            metric.add_metric(list(labels.values()), value)
            yield metric

    def samples(self) -> Iterator[tuple[str, float, dict[str, str]]]:
        gpu = {**JOB_LABELS, "gpu": "0", "uuid": 'GPU-"}0'}
        yield "carme_job_gpu_utilization_ratio", 0.8, gpu
        yield "carme_job_gpu_memory_used_bytes", 10 * GIB, gpu
        yield "carme_job_gpu_memory_total_bytes", 40 * GIB, gpu
        for mode, share in (("user", 2.5), ("system", 0.5)):
            yield "carme_job_cpu_seconds_total", share * self.seconds, {**JOB_LABELS, "mode": mode}
        yield "carme_job_cpus", 4, JOB_LABELS
        yield "carme_job_memory_used_bytes", 2 * GIB, JOB_LABELS
        yield "carme_job_memory_limit_bytes", 32 * GIB, JOB_LABELS
        yield "carme_job_memory_used_bytes", 9 * GIB, {"jobid": "77", "user": "bob"}
        yield "carme_job_io_read_bytes_total", self.seconds * 2**20, JOB_LABELS
        yield "carme_job_network_receive_bytes_total", self.seconds * 2**21, {**JOB_LABELS, "source": "node"}
        for rank in ("0", "1") if self.trains else ():
            of_rank = {**JOB_LABELS, "rank": rank}
            yield "carme_training_seconds_total", self.seconds, of_rank
            yield "carme_training_steps_total", 4 * self.seconds, of_rank
            yield "carme_training_samples_total", 128 * self.seconds, of_rank
            waited = (0.8 if rank == "0" else 0.4) * self.seconds
            yield "carme_training_wait_seconds_total", waited, {**of_rank, "cause": "data"}
            yield "carme_training_loss", 2.0 + int(rank) / 5, of_rank


class Exporter:
    """A node's exporter, its readers' certificates, and a clock of theirs and the jobs'."""

    def __init__(self, folder: Path) -> None:
        group = grp.getgrgid(os.getgid()).gr_name
        make(
            folder,
            [
                {"name": "node", "group": group, "hosts": [NODE, ELSEWHERE]},
                {"name": "reader", "group": group, "client": True},
            ],
        )
        self.node, self.certificates = Node(), folder / "reader"
        registry = CollectorRegistry()
        registry.register(self.node)
        self.server = MetricsServer("127.0.0.1:0", registry, folder / "node")
        self.port = self.server.server_port
        self.began = float(int(time.time()))
        self.exporters = Exporters(self.port, self.certificates, lambda: self.began + self.node.seconds)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """End the server."""
        self.server.shutdown()
        self.server.server_close()

    def job(self, **changes: Any) -> Job:
        values: dict[str, Any] = {
            "id": 7, "name": "train", "user": "ada", "state": JobState.RUNNING, "kind": "batch", "nodes": 1,
            "gpus": 1, "cpus": 4, "memory_mb": 32 << 10, "minutes_limit": 120, "node_list": NODE,
            "started": datetime.fromtimestamp(self.began, UTC),
        }  # fmt: skip
        return Job(**values | changes)
