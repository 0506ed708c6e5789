"""Jobs: what a user may ask for, what Slurm knows, and the words for it."""

from carme.jobs import arrays
from carme.jobs.access import Access, Association, usable, usable_partitions
from carme.jobs.checks import Share, check, check_access, partition_of, share
from carme.jobs.cluster import Cluster, Licence, Node, Partition, Reservation
from carme.jobs.explanations import waiting_for
from carme.jobs.forecast import Forecast, GpuForecast, forecast
from carme.jobs.outcome import (
    FORGOTTEN,
    LOG_FOLLOWS,
    NEVER_BEGUN,
    ending_of,
    last_lines,
    without_log,
)
from carme.jobs.requests import MAXIMUM_MINUTES, JobRequest, SessionOptions, refusal
from carme.jobs.stages import TARGETS, Stage, parse_stages, split_stages, stage_text, stage_words
from carme.jobs.states import TRANSITIONS, JobState, Phase
from carme.jobs.status import Job, StartEstimate
from carme.jobs.times import minutes_text, parse_minutes

__all__ = [
    "FORGOTTEN",
    "LOG_FOLLOWS",
    "MAXIMUM_MINUTES",
    "NEVER_BEGUN",
    "TARGETS",
    "TRANSITIONS",
    "Access",
    "Association",
    "Cluster",
    "Forecast",
    "GpuForecast",
    "Job",
    "JobRequest",
    "JobState",
    "Licence",
    "Node",
    "Partition",
    "Phase",
    "Reservation",
    "SessionOptions",
    "Share",
    "Stage",
    "StartEstimate",
    "arrays",
    "check",
    "check_access",
    "ending_of",
    "forecast",
    "last_lines",
    "minutes_text",
    "parse_minutes",
    "parse_stages",
    "partition_of",
    "refusal",
    "share",
    "split_stages",
    "stage_text",
    "stage_words",
    "usable",
    "usable_partitions",
    "waiting_for",
    "without_log",
]
