"""Jobs: what a user may ask for, what Slurm knows, and the words for it."""

from carme.jobs.checks import Share, check, partition_of, share
from carme.jobs.cluster import Cluster, Licence, Node, Partition, Reservation
from carme.jobs.endings import FORGOTTEN, LOG_FOLLOWS, ending_of, last_lines
from carme.jobs.explanations import waiting_for
from carme.jobs.forecast import Forecast, GpuForecast, forecast
from carme.jobs.requests import MAXIMUM_MINUTES, JobRequest, SessionOptions, refusal
from carme.jobs.states import TRANSITIONS, JobState, Phase
from carme.jobs.status import Job, StartEstimate
from carme.jobs.times import minutes_text, parse_minutes

__all__ = [
    "FORGOTTEN",
    "LOG_FOLLOWS",
    "MAXIMUM_MINUTES",
    "TRANSITIONS",
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
    "StartEstimate",
    "check",
    "ending_of",
    "forecast",
    "last_lines",
    "minutes_text",
    "parse_minutes",
    "partition_of",
    "refusal",
    "share",
    "waiting_for",
]
