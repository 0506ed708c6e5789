"""What one scrape of a large site costs: 2,000 nodes, 10,000 jobs of 500 users, 1,000 sessions.

The real way but for the socket: the broker makes its answer, the exporter reads it and writes metrics.
Times are the process's own processor time, so that what else the machine does is not counted.
Prints a JSON line for each part; `--nodes` and `--jobs` change the size.

With `--slurm PYTHON` also what a poll of the jobs and nodes of this host's Slurm takes, through its
commands and through the pyslurm of that Python, by turns: `median_ms` until the answer is there, `cpu_ms` of
ours and of our children for each poll, in the mean, with the start of the child that has pyslurm.
"""

import argparse
import asyncio
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry
from simulated_broker import answer_line

from carme.broker import protocol
from carme.broker.overview import JobFigures, Overview, SessionFigures
from carme.jobs import Cluster, JobState, Node, Partition
from carme.sessions import SessionState, Step
from carme.slurm import SlurmCommands
from carme.slurm.library import SlurmLibrary
from carme_monitoring.cluster.collector import ClusterCollector
from carme_monitoring.exposition import text

ROUNDS = 7
POLLS = 101


def site(nodes: int, jobs: int) -> Overview:
    """A busy site of that size."""
    now = datetime.now(UTC)
    return Overview(
        answered=now,
        cluster=Cluster(
            taken=now,
            partitions=[Partition(name="gpu", node_names=[f"n{number}" for number in range(nodes)])],
            nodes=[
                Node(
                    name=f"n{number}", state="MIXED", cpus=128, cpus_used=64, memory_mb=1_000_000,
                    gpus={"a100": 8}, gpus_used={"a100": 4},
                )
                for number in range(nodes)
            ],
        ),
        jobs=[
            JobFigures(
                id=number, user=f"user{number % 500}", account=f"account{number % 50}", partition="gpu",
                state=JobState.PENDING if number % 2 else JobState.RUNNING, reason="Priority", kind="batch",
                nodes=1, cpus=8, memory_mb=64_000, gpus=2, gpu_type="a100",
                submitted=now - timedelta(hours=1), started=None if number % 2 else now,
            )
            for number in range(jobs)
        ],
        sessions=[
            SessionFigures(
                job_id=number, image="torch", state=SessionState.READY, ending=None,
                marks={Step.ALLOCATED: now},
            )
            for number in range(jobs // 10)
        ],
    )  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--slurm", metavar="PYTHON")
    options = parser.parse_args()
    if options.slurm:
        for row in asyncio.run(poll_adapters(options.slurm)):
            print(json.dumps(row))
    overview = site(options.nodes, options.jobs)
    registry = CollectorRegistry()
    registry.register(ClusterCollector(lambda: overview, dict))
    line = answer_line(overview)
    parts: dict[str, Callable[[], Any]] = {
        "broker_answers": lambda: answer_line(overview),
        "exporter_reads": lambda: protocol.GetOverview.result.validate_python(
            protocol.Answer.model_validate_json(line).result
        ),
        "exporter_writes": lambda: text(registry.collect()),
    }
    medians = {name: _median(part) for name, part in parts.items()}
    for name, seconds in {**medians, "scrape": sum(medians.values())}.items():
        print(json.dumps({"name": name, "median_ms": round(seconds * 1000, 1)}))
    written = text(registry.collect()).decode()
    series = sum(not row.startswith("#") for row in written.splitlines())
    print(json.dumps({"name": "size", "answer_bytes": len(line), "series": series}))
    return 0


async def poll_adapters(python: str) -> list[dict[str, Any]]:
    """One poll of the queue and the nodes of this host's Slurm, through both adapters by turns."""
    commands, library = SlurmCommands(), SlurmLibrary(interpreter=python)
    jobs = len(await library.queue())
    took: dict[str, list[float]] = {"slurm_commands": [], "slurm_pyslurm": []}
    cpu = dict.fromkeys(took, 0.0)
    for _ in range(POLLS):
        for name, slurm in (("slurm_commands", commands), ("slurm_pyslurm", library)):
            begun, used = time.perf_counter(), _processor_seconds()
            await slurm.queue()
            await slurm.cluster()
            took[name].append(time.perf_counter() - begun)
            cpu[name] += _processor_seconds() - used
    used = _processor_seconds()
    await library.close()  # what its child has used is known when it has ended
    cpu["slurm_pyslurm"] += _processor_seconds() - used
    return [
        {
            "name": name,
            "median_ms": round(statistics.median(seconds) * 1000, 1),
            "cpu_ms": round(cpu[name] / POLLS * 1000, 1),
            "jobs": jobs,
        }
        for name, seconds in took.items()
    ]


def _processor_seconds() -> float:
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _median(part: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        part()
        times.append(time.process_time() - begun)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
