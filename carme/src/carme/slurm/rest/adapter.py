"""Slurm through slurmrestd for what that can do, and through Slurm's own programs for the rest."""

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar, Unpack
from urllib.parse import quote

from carme.bookings.models import ReservationSpec, Window
from carme.errors import CarmeError
from carme.jobs import Cluster, Job, JobState, Licence, Reservation
from carme.jobs.access import Association
from carme.slurm.account import UnixAccount
from carme.slurm.commands import SlurmCommands, job_script, order_of
from carme.slurm.folder import job_folder, start_in_folder
from carme.slurm.gateway import MANY_JOBS, ExitStatus, Order, Outcome, ReservationChanges
from carme.slurm.programs import run
from carme.slurm.refusals import refusal
from carme.slurm.rest import accounting, orders, records
from carme.slurm.rest.server import PROGRAM, Query, RestServer

#: The first version in which reservations can be made and changed: Slurm 25.05's.
RESERVES_FROM = "v0.0.43"
_T = TypeVar("_T")


class SlurmRest(SlurmCommands):
    """The adapter to slurmrestd.

    It reads jobs, nodes, partitions, reservations and licences. With a token of Slurm's user it reads the
    accounting of jobs, submits and cancels as the jobs' owners, changes jobs and nodes and, from Slurm 25.05
    on, makes reservations. What slurmrestd cannot do stays with the commands: the estimate of a start, the
    use of limits. So do accounts and their members.

    Where slurmrestd fails no command is tried instead: hosts that have them do not need it.

    Args:
        server: Where it is.
        python, cluster: As for `SlurmCommands`.
        default_partition: Of jobs that name none; slurmrestd does not report it.
    """

    def __init__(
        self, server: RestServer, python: str = sys.executable, cluster: str = "", default_partition: str = ""
    ) -> None:
        super().__init__(python, cluster)
        self._server = server
        self._default_partition = default_partition
        self._count = 0  # jobs at the last poll

    @property
    def has_many_jobs(self) -> bool:
        return self._count > MANY_JOBS

    def close(self) -> None:
        """Let go of the threads of its requests."""
        self._server.close()

    # -- reading ---------------------------------------------------------------------------------------------

    async def pulse(self) -> str:
        if self.has_many_jobs:  # asking for it costs as much as reading the queue
            return secrets.token_hex(8)
        return await self._read("jobs/", "jobs", records.pulse)

    async def queue(self) -> list[Job]:
        jobs = await self._read("jobs/", "jobs", records.queue)
        self._count = len(jobs)
        return jobs

    async def exit_statuses(self, ids: Iterable[int]) -> dict[int, ExitStatus]:
        return await self._read("jobs/", "jobs", lambda jobs: records.exit_statuses(jobs, ids))

    async def visible_jobs(self, ids: Iterable[int], account: UnixAccount) -> set[int]:
        if not self._server.acts_for_users:
            return await super().visible_jobs(ids, account)
        wanted = set(ids)
        return await self._read(
            "jobs/", "jobs", lambda jobs: {job["job_id"] for job in jobs} & wanted, user=account.name
        )

    async def visible_partitions(self, account: UnixAccount) -> set[str]:
        if not self._server.acts_for_users:
            return await super().visible_partitions(account)
        return await self._read(
            "partitions/", "partitions", lambda rows: {row["name"] for row in rows}, user=account.name
        )

    async def cluster(self) -> Cluster:
        nodes = await self._read("nodes/", "nodes", list)
        return await self._read(
            "partitions/",
            "partitions",
            lambda rows: records.cluster(nodes, rows, self._default_partition),
        )

    async def reservations(self) -> list[Reservation]:
        return await self._read("reservations/", "reservations", records.reservations)

    async def licences(self) -> list[Licence]:
        return await self._read("licenses/", "licenses", records.licences)

    async def has_association(self, user: str) -> bool:
        return bool(await self.associations(user))

    async def associations(self, user: str) -> list[Association]:
        if not self._server.acts_for_users:
            return await super().associations(user)
        which = {"user": user, "cluster": self._cluster}
        answer = await self._server.get("associations/", database=True, query=which)
        return self._converted(answer.get("associations"), lambda rows: records.associations(rows, user))

    async def _read(self, path: str, key: str, convert: Callable[[Any], _T], *, user: str = "") -> _T:
        """What `made` makes of a list in an answer.

        Raises:
            SlurmError: Slurm does not answer, or the answer lacks what is needed.
        """
        document = await self._server.get(path, user=user)
        return await self._server.in_thread(lambda: self._converted(document.get(key), convert))

    def _converted(self, value: Any, convert: Callable[[Any], _T], method: str = "GET") -> _T:
        try:
            return convert(value)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise self._server.unreadable(error, method) from None

    # -- the accounting --------------------------------------------------------------------------------------

    async def outcomes(self, jobs: Iterable[Job]) -> dict[int, Outcome]:
        jobs = list(jobs)
        if not self._server.acts_for_users:
            return await super().outcomes(jobs)
        which = accounting.of_jobs((job.id for job in jobs), with_steps=True)
        failed = {job.id for job in jobs if job.state is JobState.NODE_FAIL}
        return await self._accounted(which, lambda rows: accounting.outcomes(rows, failed))

    async def admin_comments(self, ids: Iterable[int]) -> dict[int, str]:
        wanted = sorted(set(ids))
        if not self._server.acts_for_users:
            return await super().admin_comments(wanted)
        return await self._accounted(
            accounting.of_jobs(wanted), lambda rows: accounting.admin_comments(rows, wanted)
        )

    async def _accounted_between(
        self, user: str | None, since: datetime, until: datetime | None
    ) -> list[Job]:
        if not self._server.acts_for_users:
            return await super()._accounted_between(user, since, until)
        return await self._accounted(accounting.between(user, since, until), accounting.jobs)

    async def _accounted_of(self, ids: Iterable[int]) -> list[Job]:
        if not self._server.acts_for_users:
            return await super()._accounted_of(ids)
        return await self._accounted(accounting.of_jobs(ids), accounting.jobs)

    async def _accounted(self, which: Query, convert: Callable[[Any], _T]) -> _T:
        """What `made` makes of these jobs of the accounting, as its administrator sees them."""
        query = {**which, **({"cluster": self._cluster} if self._cluster else {})}
        document = await self._server.get("jobs/", database=True, query=query)
        return await self._server.in_thread(lambda: self._converted(document.get("jobs"), convert))

    # -- changing --------------------------------------------------------------------------------------------

    async def submit(self, order: Order, owner: UnixAccount) -> int:
        if not self._server.acts_for_users:
            return await super().submit(order, owner)
        folder = job_folder(owner, order.key)
        outcome = await start_in_folder(order, owner, self._python, ["true"], "")
        if outcome.code:
            raise refusal("true", outcome.errors)
        try:
            return await self._submit(order, owner, 1)
        except CarmeError as error:
            if error.code != "slurm-away":  # then it may have been submitted all the same
                await run("rm", "-rf", "--", str(folder), owner=owner)
            raise

    async def submit_again(self, job: Job, owner: UnixAccount, submission: int) -> int:
        if not self._server.acts_for_users:
            return await super().submit_again(job, owner, submission)
        return await self._submit(order_of(job), owner, submission)

    async def _submit(self, order: Order, owner: UnixAccount, submission: int) -> int:
        folder = job_folder(owner, order.key)
        body = orders.description(order, owner, folder, job_script(submission))
        answer = await self._server.send("POST", "job/submit", body, user=owner.name, proof="job_id")
        return self._converted(answer, records.submitted, "POST")

    async def cancel(self, job: str, owner: UnixAccount) -> None:
        if not self._server.acts_for_users:
            return await super().cancel(job, owner)
        answer = await self._server.send("DELETE", f"job/{quote(job)}", user=owner.name)
        # The answer to what succeeded says whether it was refused.
        if words := self._converted(answer.get("status", []), records.refused, "DELETE"):
            raise refusal(PROGRAM, words)

    async def set_limit(self, job: str, minutes: int) -> None:
        if not self._server.acts_for_users:
            return await super().set_limit(job, minutes)
        limit = {"set": True, "infinite": False, "number": minutes}
        await self._change(f"job/{quote(job)}", {"time_limit": limit})

    async def set_preference(self, job_id: int, features: str) -> None:
        if not self._server.acts_for_users:
            return await super().set_preference(job_id, features)
        await self._change(f"job/{job_id}", {"prefer": features})

    async def drain_node(self, name: str, reason: str) -> None:
        if not self._server.acts_for_users:
            return await super().drain_node(name, reason)
        await self._change(f"node/{quote(name)}", {"state": ["DRAIN"], "reason": reason})

    async def resume_node(self, name: str) -> None:
        if not self._server.acts_for_users:
            return await super().resume_node(name)
        await self._change(f"node/{quote(name)}", {"state": ["RESUME"]})

    async def add_features(self, node: str, features: Iterable[str]) -> None:
        if not self._server.acts_for_users:
            return await super().add_features(node, features)
        present = await self._read(
            f"node/{quote(node)}", "nodes", lambda rows: [name for row in rows for name in row["features"]]
        )
        if new := [feature for feature in features if feature not in present]:
            both = [*present, *new]
            await self._change(f"node/{quote(node)}", {"features": both, "features_act": both})

    async def leave_reservation(self, job_id: int) -> None:
        if not self._server.acts_for_users:
            return await super().leave_reservation(job_id)
        await self._change(f"job/{job_id}", {"reservation": ""})

    async def make_reservation(self, spec: ReservationSpec) -> None:
        if not await self._can_reserve():
            return await super().make_reservation(spec)
        await self._make_reservation(orders.reservation(spec))

    async def make_maintenance(self, window: Window) -> None:
        if not await self._can_reserve():
            return await super().make_maintenance(window)
        await self._make_reservation(orders.maintenance(window))

    async def change_reservation(self, name: str, **changes: Unpack[ReservationChanges]) -> None:
        if not await self._can_reserve():
            return await super().change_reservation(name, **changes)
        if name not in await self._reservation_names():  # then slurmrestd would make it
            raise refusal(PROGRAM, "Requested reservation is invalid")
        await self._change("reservation", orders.changed_reservation(name, **changes))

    async def delete_reservation(self, name: str) -> None:
        if not await self._can_reserve():
            return await super().delete_reservation(name)
        await self._server.send("DELETE", f"reservation/{quote(name)}")

    async def _make_reservation(self, body: Mapping[str, Any]) -> None:
        if body["name"] in await self._reservation_names():  # then slurmrestd would change it
            raise refusal(PROGRAM, "Duplicate reservation name")
        await self._change("reservation", body)

    async def _reservation_names(self) -> list[str]:
        return await self._read("reservations/", "reservations", lambda rows: [row["name"] for row in rows])

    async def _can_reserve(self) -> bool:
        return self._server.acts_for_users and await self._server.version() >= RESERVES_FROM

    async def _change(self, path: str, values: Mapping[str, Any]) -> None:
        """As the owner of the token, who must be one of Slurm's operators."""
        await self._server.send("POST", path, values)
