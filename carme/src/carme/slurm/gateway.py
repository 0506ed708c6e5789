"""What the rest of the code wants of Slurm. Adapters fulfil it."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, Protocol, TypedDict, Unpack

from carme.bookings.models import ReservationSpec, Window
from carme.jobs import (
    Cluster,
    Job,
    JobRequest,
    JobState,
    Licence,
    Reservation,
    Share,
    StartEstimate,
    arrays,
)
from carme.jobs.access import Association
from carme.jobs.limits import Limits
from carme.jobs.states import Canceller
from carme.launch.spec import JobSpec
from carme.projects.models import ProjectAccount
from carme.slurm.account import UnixAccount

#: With so many jobs there is hardly a moment at which none changes, and a look at all of them takes a while.
MANY_JOBS = 2_000


@dataclass(frozen=True)
class Order:
    """A checked request, ready for submission.

    Args:
        key: 32 hex digits that name the job's private folder.
        partition, account: Where it runs and who pays; None leaves it to Slurm.
        share: Processors and memory on each node.
        spec: What `carme-job` reads on the compute node.
        after: The job that must have ended before this one begins, however it ended.
        prefer: Features of nodes that are taken first where that costs no waiting, joined by `&`.
        node_names: The nodes that it runs on, all of them; none named: any.
        constraint: A feature that its nodes must have, and then it has them for itself.
    """

    key: str
    request: JobRequest
    partition: str
    account: str | None
    share: Share
    spec: JobSpec
    after: int | None = None
    prefer: str = ""
    node_names: tuple[str, ...] = ()
    constraint: str = ""

    def job(self, job_id: int, user: str) -> Job:
        """The job of this number that it has become, as it waits at first."""
        request = self.request
        return Job(
            id=job_id,
            key=self.key,
            kind=request.kind,
            image=request.image,
            name=request.name,
            user=user,
            account=self.account or "",
            partition=self.partition,
            state=JobState.PENDING,
            reservation=request.reservation or "",
            qos=request.qos or "",
            nodes=request.nodes,
            gpus=request.nodes * request.gpus_per_node,
            gpu_type=request.gpu_type,
            cpus=request.nodes * self.share.cpus,
            memory_mb=request.nodes * self.share.memory_mb,
            minutes_limit=request.minutes,
            submitted=datetime.now(UTC).replace(microsecond=0),
            prediction=request.prediction,
            **(arrays.fields(job_id, request.array) if request.array else {}),
        )


class ExitStatus(NamedTuple):
    """How a job's script ended."""

    exit_code: int
    signal: int


class Outcome(NamedTuple):
    """What the accounting knows about the end of a job, as fields of `Job`; None is not known (yet)."""

    cancelled_by: Canceller | None = None
    peak_memory_mb: int | None = None
    failed_node: str = ""


class ReservationChanges(TypedDict, total=False):
    """What changes of a reservation; None or an empty list: that stays as it is."""

    start: datetime | None
    end: datetime | None
    node_names: Iterable[str]
    users: Iterable[str]


class Slurm(Protocol):
    """One Slurm cluster. Every method raises SlurmError, in plain words, when Slurm refuses or is away."""

    @property
    def has_many_jobs(self) -> bool:
        """Whether there were so many jobs (MANY_JOBS) at the last poll that the watch rests between polls."""
        ...

    async def pulse(self) -> str:
        """A text that differs whenever a job does; one question to the controller for all jobs together.

        With many jobs it may differ each time: then asking for it costs as much as reading the queue.
        """
        ...

    async def queue(self) -> list[Job]:
        """Every job that Slurm's controller remembers, of all users.

        A job that has not changed since the last call may be the very same object.
        """
        ...

    async def exit_statuses(self, ids: Iterable[int]) -> dict[int, ExitStatus]:
        """How these jobs ended; those that the controller has forgotten are left out."""
        ...

    async def outcomes(self, jobs: Iterable[Job]) -> dict[int, Outcome]:
        """Who cancelled these jobs, their peak memory, the node that failed; left out: not accounted yet."""
        ...

    async def visible_jobs(self, ids: Iterable[int], account: UnixAccount) -> set[int]:
        """Those of these jobs that Slurm shows to an account (PrivateData) and has not forgotten."""
        ...

    async def visible_partitions(self, account: UnixAccount) -> set[str]:
        """The partitions that Slurm shows to an account."""
        ...

    async def reservations(self) -> list[Reservation]:
        """Reservations that have not ended."""
        ...

    async def make_reservation(self, spec: ReservationSpec) -> None:
        """Keep nodes for users, from now where the start has passed; only Slurm's operators may."""
        ...

    async def make_maintenance(self, window: Window) -> None:
        """Keep nodes for the operators, over whatever runs or is reserved there (flag MAINT)."""
        ...

    async def change_reservation(self, name: str, **changes: Unpack[ReservationChanges]) -> None:
        """Change what is given of a reservation. Slurm refuses another start of one that has begun."""
        ...

    async def delete_reservation(self, name: str) -> None:
        """Give the nodes back; raises SlurmError with the code `reservation-in-use` while it has jobs."""
        ...

    async def leave_reservation(self, job_id: int) -> None:
        """Let a waiting job wait like all others, without its reservation."""
        ...

    async def licences(self) -> list[Licence]:
        """The licences that Slurm hands out."""
        ...

    async def limits(self, users: Iterable[str]) -> list[Limits]:
        """Limits of these users, of the accounts above them, and of qualities of service, with their use."""
        ...

    async def drain_node(self, name: str, reason: str) -> None:
        """Let no more jobs start on a node; those that run there go on."""
        ...

    async def resume_node(self, name: str) -> None:
        """Let jobs start on a node again."""
        ...

    async def has_association(self, user: str) -> bool:
        """Whether a user may run jobs in any account."""
        ...

    async def associations(self, user: str) -> list[Association]:
        """The accounts, qualities of service and partitions that the database lets a user use."""
        ...

    async def enforcement(self) -> list[str]:
        """What of the accounting the controller enforces: `associations`, `limits`, `qos` and others."""
        ...

    async def project_accounts(self) -> dict[str, ProjectAccount]:
        """Carme's own accounts by name, with members, limits and use."""
        ...

    async def account_exists(self, account: str) -> bool:
        """Whether there is an account of this name, no matter who made it."""
        ...

    async def make_account(self, account: str) -> None:
        """Make an account that is Carme's."""
        ...

    async def limit_account(self, account: str, values: dict[str, str]) -> None:
        """Set limits of an account, by Slurm's names."""
        ...

    async def add_member(self, account: str, user: str, partition: str = "") -> None:
        """Let a user run jobs in an account, in one partition or in all."""
        ...

    async def stop_member(self, account: str, user: str, *, stopped: bool) -> None:
        """Take no more jobs of a user in an account, or take them again."""
        ...

    async def remove_member(self, account: str, user: str, partition: str = "") -> None:
        """Undo `add_member`; raises SlurmError with the code `member-has-jobs` while there are some."""
        ...

    async def set_limit(self, job: str, minutes: int) -> None:
        """Give a job another time limit (minutes since its start), which only Slurm's operators may raise."""
        ...

    async def cluster(self) -> Cluster:
        """Partitions and nodes."""
        ...

    async def history(
        self, user: str | None, since: datetime, limit: int, until: datetime | None = None
    ) -> list[Job]:
        """Jobs in the accounting that were there between two moments, newest first."""
        ...

    async def accounted(self, job_id: int, task: int | None = None) -> Job | None:
        """One job in the accounting, or a task of the array of that number."""
        ...

    async def accounted_jobs(self, ids: Iterable[int]) -> dict[int, Job]:
        """These jobs, some hundreds at most, as the accounting has them; left out: those that it has not."""
        ...

    async def admin_comments(self, ids: Iterable[int]) -> dict[int, str]:
        """What administrators noted about jobs in the accounting; left out: not accounted (yet)."""
        ...

    async def set_admin_comment(self, job_id: int, text: str) -> None:
        """Note something about a job in the accounting, as an administrator."""
        ...

    async def coordinated_accounts(self, user: str) -> list[str]:
        """The accounts whose coordinator a user is."""
        ...

    async def submit(self, order: Order, owner: UnixAccount) -> int:
        """Make the private folder and start the job as its owner; the job's id."""
        ...

    async def submit_again(self, job: Job, owner: UnixAccount, submission: int) -> int:
        """Submit a job of ours that the controller has lost, with the folder that it has; its new id.

        Args:
            submission: Which one it is, from 2 on.
        """
        ...

    async def close_lost(self) -> None:
        """Give an end to all jobs in the accounting that the controller does not know any more.

        It closes the record of every job with the same id: none of those may be active.
        """
        ...

    async def estimate(self, order: Order, owner: UnixAccount) -> StartEstimate:
        """When the job would start."""
        ...

    async def add_features(self, node: str, features: Iterable[str]) -> None:
        """Give a node more features, for as long as the controller runs."""
        ...

    async def set_preference(self, job_id: int, features: str) -> None:
        """Have a waiting job take nodes with these features (joined by `&`) first."""
        ...

    async def cancel(self, job: str, owner: UnixAccount) -> None:
        """End a job as its owner: a `Job.slurm_name`, or the number of an array with all its tasks."""
        ...
