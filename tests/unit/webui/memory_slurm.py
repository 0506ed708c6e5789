"""Slurm's reservations and accounts of projects in dictionaries that tests read and write.

The broker's own `Bookings` and `Projects` work on them, by the part of the gateway's interface that these
need.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from carme.bookings.models import Hold, Window
from carme.jobs import Job, Reservation
from carme.projects import ProjectAccount

__all__ = ["MemorySlurm"]


class MemorySlurm:
    """What Slurm keeps of reservations and accounts.

    Args:
        queue: Its jobs by their numbers.
        put: Changes one of these.
    """

    def __init__(self, queue: dict[int, Job], put: Callable[[Job], object]) -> None:
        self._queue = queue
        self._put = put
        self.reserved: dict[str, Reservation] = {}
        self.granted: dict[str, ProjectAccount] = {}

    async def queue(self) -> list[Job]:
        return list(self._queue.values())

    async def reservations(self) -> list[Reservation]:
        return list(self.reserved.values())

    async def make_reservation(self, hold: Hold) -> None:
        fields = {"name", "start", "end", "node_names", "users", "accounts"}
        self.reserved[hold.name] = Reservation(**hold.model_dump(include=fields))

    async def make_maintenance(self, window: Window) -> None:
        self.reserved[window.name] = Reservation(**window.model_dump(), users=["root"], maintenance=True)

    async def change_reservation(
        self,
        name: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        node_names: Iterable[str] = (),
        users: Iterable[str] = (),
    ) -> None:
        new = {"start": start, "end": end, "node_names": list(node_names), "users": list(users)}
        changes = {field: value for field, value in new.items() if value}
        self.reserved[name] = self.reserved[name].model_copy(update=changes)

    async def delete_reservation(self, name: str) -> None:
        self.reserved.pop(name)

    async def leave_reservation(self, job_id: int) -> None:
        self._put(self._queue[job_id].model_copy(update={"reservation": ""}))

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
        others = {*self.granted[account].stopped} - {user}
        self._change(account, stopped=sorted(others | {user} if stopped else others))

    async def remove_member(self, account: str, user: str, partition: str = "") -> None:
        members = self.granted[account].members
        left = [name for name in members.get(user, []) if name != partition]
        others = {name: partitions for name, partitions in members.items() if name != user}
        self._change(account, members=others | ({user: left} if left else {}))
        if not left:
            await self.stop_member(account, user, stopped=False)

    def _change(self, account: str, **changes: Any) -> None:
        self.granted[account] = self.granted[account].model_copy(update=changes)
