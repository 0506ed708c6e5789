"""The Slurm jobs of this node: what they use, and which GPUs are theirs."""

from carme_monitoring.jobs.allocations import Allocation, Allocations
from carme_monitoring.jobs.cgroups import Cgroups, StepUsage, Usage
from carme_monitoring.jobs.network import Network, Traffic
from carme_monitoring.jobs.process_io import ProcessIo, ProcessIoRecords
from carme_monitoring.jobs.training import RankProgress, Training

__all__ = [
    "Allocation",
    "Allocations",
    "Cgroups",
    "Network",
    "ProcessIo",
    "ProcessIoRecords",
    "RankProgress",
    "StepUsage",
    "Traffic",
    "Training",
    "Usage",
]
