"""The sandbox's reservations: nodes for some users, from one moment to another."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Unpack

from carme.bookings.models import ReservationSpec, Window
from carme.jobs import Cluster, Job, Reservation
from carme.slurm.gateway import ReservationChanges
from carme.slurm.refusals import refusal

__all__ = ["Reservations"]


@dataclass(frozen=True)
class _Reserved:
    name: str
    start: datetime
    end: datetime
    node_names: tuple[str, ...]
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    maintenance: bool = False

    def overlaps(self, start: datetime, end: datetime) -> bool:
        return self.start < end and start < self.end

    def admits(self, user: str, account: str | None) -> bool:
        return user in self.users or account in self.accounts


class Reservations:
    """The part of the gateway's interface about reservations."""

    def __init__(self) -> None:
        self._reserved: dict[str, _Reserved] = {}

    def _active(self) -> list[Job]:
        """Jobs that are not over."""
        raise NotImplementedError

    def _changed(self) -> None:
        """Something is other than before."""
        raise NotImplementedError

    async def cluster(self) -> Cluster:
        raise NotImplementedError

    async def reservations(self) -> list[Reservation]:
        self._expire()
        nodes = {node.name: node for node in (await self.cluster()).nodes}
        return [
            Reservation(
                name=each.name,
                start=each.start,
                end=each.end,
                node_names=list(each.node_names),
                users=list(each.users),
                accounts=list(each.accounts),
                cpus=sum(nodes[name].cpus for name in each.node_names),
                gpus=sum(sum(nodes[name].gpus.values()) for name in each.node_names),
                maintenance=each.maintenance,
            )
            for each in self._reserved.values()
        ]

    async def make_reservation(self, spec: ReservationSpec) -> None:
        await self._reserve(
            _Reserved(
                spec.name,
                *self._span(spec.start, spec.end),
                tuple(spec.node_names),
                tuple(spec.users),
                tuple(spec.accounts),
            )
        )

    async def make_maintenance(self, window: Window) -> None:
        span = self._span(window.start, window.end)
        await self._reserve(_Reserved(window.name, *span, tuple(window.node_names), maintenance=True))

    async def change_reservation(self, name: str, **changes: Unpack[ReservationChanges]) -> None:
        there = self._found(name)
        start = changes.get("start")
        if start is not None and there.start <= datetime.now(UTC):
            raise refusal("scontrol", "Reservation already started")
        changed = replace(
            there,
            start=start or there.start,
            end=changes.get("end") or there.end,
            node_names=tuple(changes.get("node_names", ())) or there.node_names,
            users=tuple(changes.get("users", ())) or there.users,
        )
        await self._reserve(changed)

    async def delete_reservation(self, name: str) -> None:
        self._found(name)
        if any(job.reservation == name for job in self._active()):
            raise refusal("scontrol", "Requested reservation is in use")
        del self._reserved[name]
        self._changed()

    def _span(self, start: datetime, end: datetime) -> tuple[datetime, datetime]:
        return max(start, datetime.now(UTC).replace(microsecond=0)), end

    def _found(self, name: str) -> _Reserved:
        self._expire()
        if name not in self._reserved:
            raise refusal("scontrol", "Requested reservation is invalid")
        return self._reserved[name]

    async def _reserve(self, wanted: _Reserved) -> None:
        """Have this one instead of an earlier one of its name. Raises SlurmError where nodes are taken."""
        known = {node.name for node in (await self.cluster()).nodes}
        if not set(wanted.node_names) <= known or wanted.end <= wanted.start:
            raise refusal("scontrol", "Requested node configuration is not available")
        reserved = [each for each in self._reserved.values() if each.name != wanted.name]
        if not wanted.maintenance and any(
            each.overlaps(wanted.start, wanted.end) and set(each.node_names) & set(wanted.node_names)
            for each in reserved
        ):
            raise refusal("scontrol", "Requested nodes are busy: it overlaps with another reservation")
        self._reserved[wanted.name] = wanted
        self._changed()

    def _expire(self) -> list[str]:
        """Forget reservations that are over; their names."""
        now = datetime.now(UTC)
        over = [each.name for each in self._reserved.values() if each.end <= now]
        for name in over:
            del self._reserved[name]
        return over
