"""What administrators do, from a program; the token needs the scope `admin`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import date, datetime
from typing import Any

from carme import api
from carme.client.bookings import Booking
from carme.client.connection import Connection
from carme.client.pages import items
from carme.jobs import Node

__all__ = ["Admin"]


class Admin:
    """The site's users, nodes, jobs, announcements, maintenance, approvals and record.

    To all others there is nothing: their requests raise `NotFound`, and `Denied` where the token lacks the
    scope. What Slurm refuses raises `SlurmError`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # --- users ---

    def users(self, search: str = "", *, limit: int | None = 50) -> list[api.UserOut]:
        """Users, the latest first; of those names or addresses that have the words."""
        return [api.UserOut.model_validate(item) for item in self._items("users", limit, q=search or None)]

    def user(self, name: str) -> api.UserOut:
        """One user."""
        return api.UserOut.model_validate(self._connection.ask("GET", f"admin/users/{name}"))

    def onboard(self, name: str, *, email: str = "", project: str = "") -> api.Onboarded:
        """Give a user a portal account, an association in Slurm, a home, quotas and a project.

        What is there stays, so it may be requested again.
        """
        requested = {"name": name, "email": email, "project": project}
        return api.Onboarded.model_validate(self._connection.ask("POST", "admin/users", requested))

    def take_in(self, name: str, *, email: str = "", project: str = "") -> api.Onboarded:
        """The earlier name of `onboard`."""
        _renamed("take_in", "onboard")
        return self.onboard(name, email=email, project=project)

    def set_active(self, name: str, active: bool) -> api.UserOut:
        """Let a user sign in again, or no more."""
        found = self._connection.ask("PATCH", f"admin/users/{name}", {"active": active})
        return api.UserOut.model_validate(found)

    def remove_second_factor(self, name: str) -> None:
        """Take the second factor off the account of a user who has lost it."""
        self._connection.ask("DELETE", f"admin/users/{name}/second-factor")

    def take_second_factor(self, name: str) -> None:
        """The earlier name of `remove_second_factor`."""
        _renamed("take_second_factor", "remove_second_factor")
        self.remove_second_factor(name)

    def message(self, name: str, message: str) -> None:
        """Send a user a message, on pages and by mail."""
        self._connection.ask("POST", f"admin/users/{name}/messages", {"message": message})

    # --- nodes and jobs ---

    def nodes(self) -> list[Node]:
        """All nodes with their states and reasons."""
        return [Node.model_validate(each) for each in self._connection.ask("GET", "admin/nodes")]

    def drain(self, node: str, reason: str) -> None:
        """Let no more jobs start on a node; those that run go on."""
        self._connection.ask("PUT", f"admin/nodes/{node}/drain", {"reason": reason})

    def resume(self, node: str) -> None:
        """Let jobs start on a node again."""
        self._connection.ask("DELETE", f"admin/nodes/{node}/drain")

    def jobs(self, search: str = "", *, limit: int | None = 50) -> list[api.OthersJob]:
        """All jobs and sessions that wait or run; of a user, an account, a number, or a part of a name."""
        return [api.OthersJob.model_validate(item) for item in self._items("jobs", limit, q=search or None)]

    def stop(self, job: int, message: str = "") -> api.OthersJob:
        """End somebody's job or session, and notify its owner of the reason."""
        found = self._connection.ask("POST", f"admin/jobs/{job}/stop", {"message": message})
        return api.OthersJob.model_validate(found)

    # --- approvals, record, policies ---

    def approvals(self, *, limit: int | None = 50) -> list[Booking]:
        """Bookings that wait for an answer."""
        found = self._items("approvals", limit)
        return [Booking(self._connection, api.BookingOut.model_validate(each)) for each in found]

    def decide(self, booking: str, approve: bool, reason: str = "") -> api.BookingOut:
        """Approve or refuse a booking that waits for that; its owner is notified of the reason."""
        requested = {"approve": approve, "reason": reason}
        found = self._connection.ask("POST", f"bookings/{booking}/decision", requested)
        return api.BookingOut.model_validate(found)

    def record(
        self,
        search: str = "",
        *,
        who: str = "",
        kind: str = "",
        since: date | None = None,
        until: date | None = None,
        limit: int | None = 50,
    ) -> list[api.ChangeOut]:
        """The audit log, the latest first: who, when, what, before and after.

        Args:
            search: Part of what was changed, or of its values.
            who: A user's name.
            kind: Of what, as the answers call it, like `booking`.
            since: The first day (UTC).
            until: The last day.
        """
        words = {"q": search or None, "who": who or None, "kind": kind or None}
        found = self._items("record", limit, since=since, until=until, **words)
        return [api.ChangeOut.model_validate(each) for each in found]

    def policies(self) -> list[api.PolicyOut]:
        """The site's limits and policies as they hold."""
        return [api.PolicyOut.model_validate(each) for each in self._connection.ask("GET", "admin/policies")]

    # --- announcements and maintenance ---

    def news(self, *, limit: int | None = 50) -> list[api.NewsOut]:
        """All announcements, the latest first."""
        return [api.NewsOut.model_validate(item) for item in items(self._connection, "news/all", limit)]

    def publish(
        self, title: str, text: str = "", *, until: date | None = None, number: int | None = None
    ) -> api.NewsOut:
        """Publish an announcement.

        Args:
            until: The last day on which it is on the dashboard.
            number: That of the announcement that this replaces.
        """
        requested = {"title": title, "text": text, "until": until.isoformat() if until else None}
        where = ("POST", "news") if number is None else ("PUT", f"news/{number}")
        return api.NewsOut.model_validate(self._connection.ask(*where, requested))

    def delete_news(self, number: int) -> None:
        """Withdraw an announcement, by its number."""
        self._connection.ask("DELETE", f"news/{number}")

    def take_away(self, number: int) -> None:
        """The earlier name of `delete_news`."""
        _renamed("take_away", "delete_news")
        self.delete_news(number)

    def maintenance(self) -> list[api.MaintenanceOut]:
        """Maintenance that is planned or going on, the next one first."""
        return [
            api.MaintenanceOut.model_validate(each) for each in self._connection.ask("GET", "maintenance")
        ]

    def plan_maintenance(
        self, title: str, *, start: datetime, end: datetime, nodes: Sequence[str] = (), text: str = ""
    ) -> api.MaintenanceOut:
        """Keep nodes free for maintenance.

        Args:
            start: When it begins; with a zone.
            nodes: Which; none: all.
            text: What users should know.
        """
        requested = {"title": title, "text": text, "nodes": list(nodes)}
        requested |= {"start": start.isoformat(), "end": end.isoformat()}
        return api.MaintenanceOut.model_validate(self._connection.ask("POST", "maintenance", requested))

    def change_maintenance(self, name: str, **values: Any) -> api.MaintenanceOut:
        """Change `title`, `text`, `nodes`, `start` or `end`; the rest stays."""
        sent = {
            key: value.isoformat() if isinstance(value, datetime) else value for key, value in values.items()
        }
        return api.MaintenanceOut.model_validate(self._connection.ask("PATCH", f"maintenance/{name}", sent))

    def cancel_maintenance(self, name: str) -> None:
        """Do not do it, or end it now."""
        self._connection.ask("DELETE", f"maintenance/{name}")

    def call_off(self, name: str) -> None:
        """The earlier name of `cancel_maintenance`."""
        _renamed("call_off", "cancel_maintenance")
        self.cancel_maintenance(name)

    def _items(self, path: str, limit: int | None, **query: Any) -> Any:
        return items(self._connection, f"admin/{path}", limit, **query)


def _renamed(earlier: str, name: str) -> None:
    warnings.warn(f"admin.{earlier} is admin.{name} now. Use that.", DeprecationWarning, stacklevel=3)
