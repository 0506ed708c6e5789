"""The reservations of Slurm that bookings need, and no others."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from carme.bookings.models import MAXIMUM_MINUTES, ReservationSpec, Window
from carme.bookings.reconcile import differs, is_maintenance, is_ours, shifted
from carme.config import Settings
from carme.errors import Denied, InvalidRequest, SlurmError
from carme.jobs import Cluster, Reservation
from carme.slurm import Slurm
from carme.translation import message as _
from carme.wording import listing

# However many calendars are open, Slurm's reservations are queried at most this often.
POLL_SECONDS = 3.0


class Bookings:
    """Makes, changes and deletes reservations, one at a time, and knows which there are."""

    def __init__(self, settings: Settings, slurm: Slurm) -> None:
        self._settings = settings
        self._slurm = slurm
        self._turn = asyncio.Lock()
        self._seen: list[Reservation] = []
        self._seen_at = -POLL_SECONDS

    async def reservations(self) -> list[Reservation]:
        """Those that have not ended, as Slurm knew them some seconds ago at most."""
        async with self._turn:
            if time.monotonic() >= self._seen_at + POLL_SECONDS:
                await self._read_reservations()
            return self._seen

    async def _read_reservations(self) -> dict[str, Reservation]:
        self._seen = await self._slurm.reservations()
        self._seen_at = time.monotonic()
        return {each.name: each for each in self._seen}

    async def reserve(self, spec: ReservationSpec, cluster: Cluster) -> Reservation:
        """Make Slurm keep what a booking holds. What is kept already is left as it is.

        Raises:
            InvalidRequest: It holds something that there is not, or cannot be booked.
            SlurmError: Slurm refused, or is away.
        """
        self._check(spec, cluster)
        return await self._settle(
            spec,
            lambda there: differs(spec, there, datetime.now(UTC)),
            lambda: self._slurm.make_reservation(spec),
        )

    async def maintain(self, window: Window, cluster: Cluster) -> Reservation:
        """Make Slurm keep nodes for maintenance: whatever runs or is reserved there, no job starts then.

        Raises:
            InvalidRequest: There is no such node, or the time is over or too long.
            SlurmError: Slurm refused, or is away.
        """
        _check_time(window.end, "The maintenance")
        known = {node.name for node in cluster.nodes}
        if strange := sorted(set(window.node_names) - known):
            raise InvalidRequest(
                _("There is no node {strange!r}.", strange=strange[0]),
                _("There are: {known}.", known=listing(known)),
                field="node_names",
            )
        return await self._settle(
            window,
            lambda there: shifted(window, there, datetime.now(UTC)),
            lambda: self._slurm.make_maintenance(window),
        )

    async def _settle(
        self,
        wanted: ReservationSpec | Window,
        is_other: Callable[[Reservation], bool],
        make: Callable[[], Awaitable[None]],
    ) -> Reservation:
        """Make a reservation, change it, or leave it as it is; what Slurm then has."""
        async with self._turn:
            there = (await self._read_reservations()).get(wanted.name)
            if there is None:
                await make()
            elif is_other(there):
                await self._change(wanted, there)
            else:
                return there
            saved = (await self._read_reservations()).get(wanted.name)
        if saved is None:
            raise _lost_error(wanted.name)
        return saved

    async def _change(self, spec: ReservationSpec | Window, there: Reservation) -> None:
        # Slurm refuses to set what it has already once jobs run there, so only what differs is set.
        await self._slurm.change_reservation(
            spec.name,
            start=spec.start if spec.start != there.start and there.start > datetime.now(UTC) else None,
            end=spec.end if spec.end != there.end else None,
            node_names=spec.node_names if set(spec.node_names) != set(there.node_names) else (),
            users=spec.users
            if isinstance(spec, ReservationSpec) and set(spec.users) != set(there.users)
            else (),
        )

    def _check(self, spec: ReservationSpec, cluster: Cluster) -> None:
        if not self._settings.booking_policy(spec.partition).enabled:
            raise InvalidRequest(
                _("GPUs of partition {partition!r} cannot be booked.", partition=spec.partition),
                _("An administrator can allow it in [bookings] of carme.toml."),
                field="partition",
            )
        _check_time(spec.end, "The booking")
        members = {partition.name: partition.node_names for partition in cluster.partitions}
        if spec.partition not in members:
            raise InvalidRequest(
                _(
                    "There is no partition {partition!r}; there are: {members}.",
                    partition=spec.partition,
                    members=listing(members),
                ),
                _("Choose one of these."),
                field="partition",
            )
        if strange := sorted(set(spec.node_names) - set(members[spec.partition])):
            raise InvalidRequest(
                _(
                    "The partition {partition!r} has no node {strange!r}.",
                    partition=spec.partition,
                    strange=strange[0],
                ),
                _("It has: {members}.", members=listing(members[spec.partition])),
                field="node_names",
            )

    async def release(self, name: str) -> None:
        """Give back what a booking keeps; right also when nothing is kept.

        Jobs that wait for it wait like all others from then on; those that run in it are ended by Slurm.

        Raises:
            Denied: The reservation is not one of ours.
            SlurmError: Slurm refused, or is away.
        """
        if not (is_ours(name) or is_maintenance(name)):
            raise Denied(
                _("The reservation {name!r} is not a booking of Carme's.", name=name),
                _("Change it with 'scontrol'."),
            )
        async with self._turn:
            there = (await self._read_reservations()).get(name)
            if there is None:
                return
            try:
                await self._slurm.delete_reservation(name)
            except SlurmError as error:
                if error.code != "reservation-in-use":
                    raise
                await self._empty(there)
            await self._read_reservations()

    async def _empty(self, reservation: Reservation) -> None:
        """Give back a reservation that jobs use."""
        jobs = [job for job in await self._slurm.queue() if job.reservation == reservation.name]
        for job in jobs:
            if job.is_pending:
                await self._slurm.leave_reservation(job.id)
        now = datetime.now(UTC).replace(microsecond=0)
        if not any(job.is_active and not job.is_pending for job in jobs) or reservation.start > now:
            await self._slurm.delete_reservation(reservation.name)
        elif reservation.end > now:
            # Slurm deletes none in which jobs run. At its end it ends them, and then the reservation.
            await self._slurm.change_reservation(reservation.name, end=now + timedelta(seconds=1))


def _check_time(end: datetime, what: str) -> None:
    now = datetime.now(UTC)
    if end <= now:
        raise InvalidRequest(_("{what} is over.", what=what), _("Choose a later end."), field="end")
    if end > now + timedelta(minutes=MAXIMUM_MINUTES):
        raise InvalidRequest(
            _("{what} must end within a year.", what=what), _("Choose an earlier end."), field="end"
        )


def _lost_error(name: str) -> SlurmError:
    return SlurmError(
        _("Slurm created the reservation {name} but then lost it.", name=name),
        _("Carme creates it again in a moment."),
        code="slurm-away",
    )
