"""Jobs: what a user may ask for, what Slurm knows, and the words for it."""

from carme.jobs.checks import Share, check, partition_of, share
from carme.jobs.cluster import Cluster, Node, Partition
from carme.jobs.explanations import FORGOTTEN, explain
from carme.jobs.requests import JobRequest, SessionOptions, refusal
from carme.jobs.states import TRANSITIONS, JobState, Phase
from carme.jobs.status import Job, StartEstimate
from carme.jobs.times import minutes_text, parse_minutes

__all__ = [
    "FORGOTTEN",
    "TRANSITIONS",
    "Cluster",
    "Job",
    "JobRequest",
    "JobState",
    "Node",
    "Partition",
    "Phase",
    "SessionOptions",
    "Share",
    "StartEstimate",
    "check",
    "explain",
    "minutes_text",
    "parse_minutes",
    "partition_of",
    "refusal",
    "share",
]
