"""What a job used of what it requested, and what to change."""

from carme.reports.advice import advise
from carme.reports.models import (
    Advice,
    Curve,
    GpuUse,
    JobWarning,
    NodeUse,
    Peers,
    RankUse,
    Report,
    TrainingUse,
    Usage,
)
from carme.reports.record import read_record, write_record

__all__ = [
    "Advice",
    "Curve",
    "GpuUse",
    "JobWarning",
    "NodeUse",
    "Peers",
    "RankUse",
    "Report",
    "TrainingUse",
    "Usage",
    "advise",
    "read_record",
    "write_record",
]
