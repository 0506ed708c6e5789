"""Bookings from a program."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from carme import api
from carme.client.connection import Connection
from carme.client.pages import items
from carme.client.remote_object import RemoteObject

__all__ = ["Booking", "Bookings"]


class Booking(RemoteObject[api.BookingOut]):
    """A booking that I may use."""

    def __repr__(self) -> str:
        return f"<Booking {self.name} {self._known.state}>"

    @property
    def name(self) -> str:
        """What sessions and jobs name as `reservation`."""
        return self._known.name

    @property
    def known(self) -> api.BookingOut:
        """What was known of it last."""
        return self._known

    def info(self) -> api.BookingOut:
        """How it stands now."""
        return self._is(self._connection.ask("GET", f"bookings/{self.name}"))

    def change(self, **values: Any) -> api.BookingOut:
        """Make it another one: `start`, `minutes`, `nodes`, `title`, `users` and the like; the rest stays.

        Raises:
            InvalidRequest: It cannot be had; the booking stays what it was.
        """
        if isinstance(values.get("start"), datetime):
            values["start"] = values["start"].isoformat()
        return self._is(self._connection.ask("PATCH", f"bookings/{self.name}", values))

    def start_session(
        self, image: str | None, *, stage: Sequence[str] = (), results: str | None = None
    ) -> api.BookingOut:
        """Have a session start by itself in its first minute; without an image none does.

        Args:
            stage: What is brought to its nodes before it begins: the site's datasets, or absolute paths of
                the cluster, with `local:` (default), `scratch:` or `ram:` in front.
            results: The folder of the cluster to which what it leaves in `CARME_RESULTS` is copied.

        Raises:
            InvalidRequest: There is no such image or dataset, or the session has been started already.
        """
        requested = {"image": image, "stage": list(stage), "results": results}
        return self._is(self._connection.ask("PUT", f"bookings/{self.name}/session", requested))

    def offer(self, user: str | None) -> api.BookingOut:
        """Let another user take it over; None: nobody any more. It stays mine until then."""
        return self._is(self._connection.ask("PUT", f"bookings/{self.name}/offer", {"user": user}))

    def accept(self) -> api.BookingOut:
        """Take over what was offered to me. Raises InvalidRequest when the rules forbid it."""
        return self._is(self._connection.ask("POST", f"bookings/{self.name}/offer", {"accept": True}))

    def decline(self) -> api.BookingOut:
        """Do not take over what was offered to me."""
        return self._is(self._connection.ask("POST", f"bookings/{self.name}/offer", {"accept": False}))

    def delete(self) -> None:
        """Give its nodes back."""
        self._connection.ask("DELETE", f"bookings/{self.name}")


class Bookings:
    """My bookings."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(
        self,
        *,
        start: datetime,
        minutes: int,
        gpu_type: str,
        gpus: int,
        partition: str,
        nodes: int = 1,
        title: str = "",
        users: list[str] | None = None,
        project: str = "",
    ) -> Booking:
        """Book nodes, whole.

        Args:
            start: When; with a zone.
            minutes: How long.
            gpus: How many each node has; see `kinds`.
            users: Who may use it besides me.
            project: The project that it is for, by its name; then all of its members may use it.

        Raises:
            InvalidRequest: The site's rules or what others have forbid it; see `free_slots`.
        """
        sent = {"start": start.isoformat(), "minutes": minutes, "gpu_type": gpu_type, "gpus_per_node": gpus}
        sent |= {"partition": partition, "nodes": nodes, "title": title, "users": users or []}
        sent |= {"project": project}
        return self._booking(self._connection.ask("POST", "bookings", sent))

    def get(self, name: str) -> Booking:
        """One that I may see. Raises NotFound."""
        return self._booking(self._connection.ask("GET", f"bookings/{name}"))

    def list(self, *, state: str | None = None, limit: int | None = 50) -> list[Booking]:
        """My bookings, newest first.

        Args:
            state: `requested`, `approved`, `active` or `ended`.
            limit: How many at most; None: all.
        """
        return [self._booking(item) for item in items(self._connection, "bookings", limit, state=state)]

    def usable(self) -> list[Booking]:
        """Those in which I may run something, mine and others', the next one first."""
        return [self._booking(each) for each in self._connection.ask("GET", "bookings/usable")]

    def kinds(self) -> list[api.NodeKind]:
        """Which nodes can be booked."""
        return [api.NodeKind.model_validate(each) for each in self._connection.ask("GET", "bookings/kinds")]

    def free_slots(
        self, *, start: datetime, minutes: int, gpu_type: str, gpus: int, partition: str, nodes: int = 1
    ) -> list[api.Slot]:
        """The times nearest to `start` at which such nodes could be had."""
        query = {"start": start.isoformat(), "minutes": minutes, "gpu_type": gpu_type, "gpus_per_node": gpus}
        found = self._connection.ask("GET", "bookings/slots", **query, partition=partition, nodes=nodes)
        return [api.Slot.model_validate(each) for each in found]

    def _booking(self, found: object) -> Booking:
        return Booking(self._connection, api.BookingOut.model_validate(found))
