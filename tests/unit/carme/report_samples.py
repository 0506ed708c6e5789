"""A job and what it used, as tests of reports have them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from carme.jobs import Job, JobState
from carme.reports import GpuUse, NodeUse, TrainingUse, Usage

GIB = 1 << 30
END = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=10)
BEGIN = END - timedelta(hours=1)


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "id": 7, "name": "train", "user": "ada", "state": JobState.COMPLETED, "kind": "batch", "nodes": 1,
        "gpus": 2, "cpus": 4, "memory_mb": 32 << 10, "minutes_limit": 120, "submitted": BEGIN,
        "started": BEGIN, "ended": END,
    }  # fmt: skip
    return Job(**values | changes)


def usage(busy: tuple[float, ...] = (0.9, 0.9), **changes: Any) -> Usage:
    node: dict[str, Any] = {
        "cpus": 4, "cpus_used": 2.0, "memory_bytes": 20 * GIB, "memory_limit_bytes": 32 * GIB
    }  # fmt: skip
    return Usage(
        seconds=3600,
        nodes=[NodeUse(node="n1", **node | changes)],
        gpus=[
            GpuUse(node="n1", gpu=str(place), busy=share, active=float(share > 0.05), energy_joules=3.6e6)
            for place, share in enumerate(busy)
        ],
    )


def trained(data_wait: float, rank_wait: float | None = None, **changes: Any) -> Usage:
    reported = TrainingUse(ranks=2, step_seconds=0.25, data_wait=data_wait, rank_wait=rank_wait, loss=0.5)
    return usage(**changes).model_copy(update={"training": reported})
