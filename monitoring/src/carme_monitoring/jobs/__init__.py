"""The Slurm jobs of this node: what they use, and which GPUs are theirs."""

from carme_monitoring.jobs.allocations import Allocation, Allocations
from carme_monitoring.jobs.cgroups import Cgroups, StepUsage, Usage

__all__ = ["Allocation", "Allocations", "Cgroups", "StepUsage", "Usage"]
