"""What the rest of the code wants of Slurm. Adapters fulfil it."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from carme.jobs import Cluster, Job, JobRequest, Share, StartEstimate
from carme.slurm.account import UnixAccount


@dataclass(frozen=True)
class Order:
    """A checked request, ready for submission.

    Args:
        key: 32 hex digits that name the job's private folder.
        partition, account: Where it runs and who pays; None leaves it to Slurm.
        share: Processors and memory on each node.
        spec: What `carme-job` reads on the compute node.
    """

    key: str
    request: JobRequest
    partition: str
    account: str | None
    share: Share
    spec: dict[str, Any]


class Ending(NamedTuple):
    """How a job's script ended."""

    exit_code: int
    signal: int


class Slurm(Protocol):
    """One Slurm cluster. Every method raises SlurmError, in plain words, when Slurm refuses or is away."""

    async def queue(self) -> list[Job]:
        """Every job that Slurm's controller remembers, of all users."""
        ...

    async def endings(self, ids: Iterable[int]) -> dict[int, Ending]:
        """How these jobs ended; those that the controller has forgotten are left out."""
        ...

    async def cluster(self) -> Cluster:
        """Partitions and nodes."""
        ...

    async def history(self, user: str | None, since: datetime, limit: int) -> list[Job]:
        """Jobs in the accounting, newest first."""
        ...

    async def accounted(self, job_id: int) -> Job | None:
        """One job in the accounting."""
        ...

    async def submit(self, order: Order, owner: UnixAccount) -> int:
        """Make the private folder and start the job as its owner; the job's id."""
        ...

    async def estimate(self, order: Order, owner: UnixAccount) -> StartEstimate:
        """When the job would start."""
        ...

    async def cancel(self, job_id: int, owner: UnixAccount) -> None:
        """End a job as its owner."""
        ...
