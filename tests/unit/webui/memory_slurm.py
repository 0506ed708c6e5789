"""A Slurm in dictionaries that tests read and write: what the broker needs of the gateway's interface for
requests.

Time does not pass in it: jobs, nodes and reservations stay as they are until a request or the test changes
them. Slurm in time is the sandbox (`carme.sandbox`).
"""

from collections.abc import Callable, Iterable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Unpack

from carme.bookings.models import ReservationSpec, Window
from carme.errors import NotFound
from carme.jobs import Access, Cluster, Job, JobRequest, JobState, Reservation, StartEstimate, arrays
from carme.jobs.access import Association
from carme.jobs.limits import Limits
from carme.projects import ProjectAccount
from carme.slurm import Order, UnixAccount
from carme.slurm.gateway import ReservationChanges

__all__ = ["NOW", "MemorySlurm"]

#: When the nodes of tests were read, which stands for the moment at which they are read.
NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


class MemorySlurm:
    """What Slurm keeps of jobs, reservations and accounts.

    Args:
        queue: Its jobs by their numbers.
        nodes: Its nodes and partitions.

    Attributes:
        archive: Jobs that only the accounting has.
        reserved, granted: Reservations, and accounts of projects, by name.
        accesses, leads: What users may use, and the accounts that they lead.
        wanted: What jobs were submitted with.
        starts: When a request would begin; None: at once.
    """

    has_many_jobs = False

    def __init__(self, queue: MutableMapping[int, Job], nodes: Cluster) -> None:
        self._queue = queue
        self.nodes = nodes
        self.archive: dict[int, Job] = {}
        self.reserved: dict[str, Reservation] = {}
        self.granted: dict[str, ProjectAccount] = {}
        self.accesses: dict[str, Access] = {}
        self.leads: dict[str, list[str]] = {}
        self.wanted: dict[int, JobRequest] = {}
        self.starts: Callable[[JobRequest], datetime] | None = None

    async def cluster(self) -> Cluster:
        """Read at this moment, unless the test says when."""
        taken = datetime.now(UTC) if self.nodes.taken == NOW else self.nodes.taken
        return self.nodes.model_copy(update={"taken": taken})

    async def drain_node(self, name: str, reason: str) -> None:
        """Nodes stay as the test has them."""

    async def resume_node(self, name: str) -> None:
        """Nodes stay as the test has them."""

    async def queue(self) -> list[Job]:
        return list(self._queue.values())

    async def accounted(self, job_id: int, task: int | None = None) -> Job | None:
        if task is None:
            return self.archive.get(job_id)
        found = [job for job in self.archive.values() if job.has_task(job_id, task)]
        return next((job for job in found if job.task == task), found[0] if found else None)

    async def accounted_jobs(self, ids: Iterable[int]) -> dict[int, Job]:
        return {job_id: self.archive[job_id] for job_id in ids if job_id in self.archive}

    async def history(
        self, user: str | None, since: datetime, limit: int, until: datetime | None = None
    ) -> list[Job]:
        """Without an end all jobs count, as those of tests are of a certain day."""
        found = [
            job
            for job in self.archive.values()
            if user in (None, job.user)
            and (until is None or (job.submitted is not None and since <= job.submitted < until))
        ]
        return sorted(found, key=lambda job: job.id, reverse=True)[:limit]

    async def admin_comments(self, ids: Iterable[int]) -> dict[int, str]:
        """Nobody has recorded what jobs used."""
        return {}

    async def submit(self, order: Order, owner: UnixAccount) -> int:
        number = max([100, *self._queue, *self.archive]) + 1
        self.wanted[number] = order.request
        self._queue[number] = order.job(number, owner.name)
        return number

    async def estimate(self, order: Order, owner: UnixAccount) -> StartEstimate:
        start = self.starts(order.request) if self.starts else datetime.now(UTC)
        return StartEstimate(nodes="n1", start=start)

    async def cancel(self, job: str, owner: UnixAccount) -> None:
        """Remove a job from the queue at once; of tasks that wait together, remove only the cancelled one."""
        number, task = arrays.read_name(job) if "[" not in job else (int(job.partition("_")[0]), None)
        found = [
            item
            for item in list(self._queue.values())
            if item.user == owner.name
            and (item.has_task(number, task) if task is not None else number in (item.array_id, item.id))
        ]
        if not found:
            raise NotFound("Slurm does not know this job (any more).")
        for item in found:
            rest = [each for each in arrays.numbers(item.tasks) if each != task] if item.tasks else []
            if task is not None and rest:
                tasks = arrays.limited(arrays.listed(rest), item.tasks)
                self._queue[item.id] = item.model_copy(update={"tasks": tasks})
                continue
            del self._queue[item.id]
            over = {"state": JobState.CANCELLED, "ended": datetime.now(UTC)}
            self.archive[item.id] = item.model_copy(update=over)

    async def set_limit(self, job: str, minutes: int) -> None:
        """A job that runs gets another time limit, however long it has run."""
        found = next((item for item in self._queue.values() if item.slurm_name == job), None)
        if found is None:
            raise NotFound("Slurm does not know this job (any more).")
        self._queue[found.id] = found.model_copy(update={"minutes_limit": minutes})

    async def associations(self, user: str) -> list[Association]:
        return self.accesses[user].associations if user in self.accesses else []

    async def enforcement(self) -> list[str]:
        return sorted({name for access in self.accesses.values() for name in access.enforced})

    async def limits(self, users: Iterable[str]) -> list[Limits]:
        return [limit for user in users if user in self.accesses for limit in self.accesses[user].limits]

    async def coordinated_accounts(self, user: str) -> list[str]:
        return self.leads.get(user, [])

    async def has_association(self, user: str) -> bool:
        return True

    async def reservations(self) -> list[Reservation]:
        return list(self.reserved.values())

    async def make_reservation(self, spec: ReservationSpec) -> None:
        fields = {"name", "start", "end", "node_names", "users", "accounts"}
        self.reserved[spec.name] = Reservation(**spec.model_dump(include=fields))

    async def make_maintenance(self, window: Window) -> None:
        self.reserved[window.name] = Reservation(**window.model_dump(), users=["root"], maintenance=True)

    async def change_reservation(self, name: str, **changes: Unpack[ReservationChanges]) -> None:
        given = {field: value for field, value in changes.items() if value}
        self.reserved[name] = self.reserved[name].model_copy(update=given)

    async def delete_reservation(self, name: str) -> None:
        self.reserved.pop(name)

    async def leave_reservation(self, job_id: int) -> None:
        self._queue[job_id] = self._queue[job_id].model_copy(update={"reservation": ""})

    async def project_accounts(self) -> dict[str, ProjectAccount]:
        return dict(self.granted)

    async def account_exists(self, account: str) -> bool:
        return account in self.granted

    async def make_account(self, account: str) -> None:
        self.granted[account] = ProjectAccount(account=account)

    async def limit_account(self, account: str, values: dict[str, str]) -> None:
        """Set limits as `sacctmgr modify account` takes them; -1: none."""
        resources = dict(self.granted[account].resources)
        for pair in filter(None, values.get("GrpTRES", "").split(",")):
            name, _, most = pair.partition("=")
            resources.pop(name, None)
            if int(most) >= 0:
                resources[name] = int(most)
        changes: dict[str, Any] = {"resources": resources}
        numbers = {"jobs": values.get("GrpJobs"), "minutes": values.get("MaxWall")}
        numbers["gpu_minutes"] = values.get("GrpTRESMins", "").partition("=")[2]
        changes |= {field: None if int(text) < 0 else int(text) for field, text in numbers.items() if text}
        self._change(account, **changes)

    async def add_member(self, account: str, user: str, partition: str = "") -> None:
        members = self.granted[account].members
        self._change(account, members=members | {user: [*members.get(user, []), partition]})

    async def stop_member(self, account: str, user: str, *, stopped: bool) -> None:
        stopped_members = {*self.granted[account].stopped} - {user}
        self._change(account, stopped=sorted(stopped_members | {user} if stopped else stopped_members))

    async def remove_member(self, account: str, user: str, partition: str = "") -> None:
        members = self.granted[account].members
        left = [name for name in members.get(user, []) if name != partition]
        remaining = {name: partitions for name, partitions in members.items() if name != user}
        self._change(account, members=remaining | ({user: left} if left else {}))
        if not left:
            await self.stop_member(account, user, stopped=False)

    def _change(self, account: str, **changes: Any) -> None:
        self.granted[account] = self.granted[account].model_copy(update=changes)
