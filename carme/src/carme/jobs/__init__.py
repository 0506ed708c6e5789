"""Jobs: what a user may ask for, what Slurm knows, and the words for it."""

from carme.jobs.checks import Share, check, share
from carme.jobs.cluster import Cluster, Node, Partition
from carme.jobs.explanations import explain
from carme.jobs.requests import JobRequest, SessionOptions
from carme.jobs.states import TRANSITIONS, JobState, Phase
from carme.jobs.status import Job
from carme.jobs.times import minutes_text, parse_minutes

__all__ = [
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
    "check",
    "explain",
    "minutes_text",
    "parse_minutes",
    "share",
]
