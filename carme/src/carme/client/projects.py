"""Projects from a program."""

from __future__ import annotations

from typing import Any

from carme import api
from carme.client.connection import Connection

__all__ = ["Projects"]


class Projects:
    """My projects; for administrators, whose token says so, all.

    Who may do what is as on the pages: managers of a project say who is in it, administrators what it may
    use.
    All methods raise `Denied`, `NotFound`, `InvalidRequest` with its field, and what Slurm refuses.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self) -> list[api.ProjectOut]:
        """My projects: who is in them, what they may use and have used."""
        return self.list()

    def list(self) -> list[api.ProjectOut]:
        """My projects: who is in them, what they may use and have used."""
        return [api.ProjectOut.model_validate(each) for each in self._connection.ask("GET", "projects")]

    def get(self, name: str) -> api.ProjectOut:
        """One of them."""
        return _project(self._connection.ask("GET", f"projects/{name}"))

    def create(self, name: str, title: str, manager: str) -> api.ProjectOut:
        """Make one with its first manager; for administrators."""
        requested = {"name": name, "title": title, "manager": manager}
        return _project(self._connection.ask("POST", "projects", requested))

    def limit(self, name: str, **limits: Any) -> api.ProjectOut:
        """Change what it may use; for administrators.

        Args:
            limits: Some of `title`, `partitions`, `gpu_types` (type to number), `gpus`, `nodes`, `jobs`,
                `minutes`, `gpu_hours`; None: no limit. What is left out stays.
        """
        return _project(self._connection.ask("PATCH", f"projects/{name}", limits))

    def close(self, name: str) -> api.ProjectOut:
        """Have it take no more jobs; for administrators."""
        return _project(self._connection.ask("PUT", f"projects/{name}/state", {"closed": True}))

    def reopen(self, name: str) -> api.ProjectOut:
        """Have it take jobs again; for administrators."""
        return _project(self._connection.ask("PUT", f"projects/{name}/state", {"closed": False}))

    def invite(self, name: str, user: str) -> api.ProjectOut:
        """Ask a user to join."""
        return _project(self._connection.ask("POST", f"projects/{name}/invitations", {"user": user}))

    def withdraw(self, name: str, user: str) -> api.ProjectOut:
        """Take an invitation back."""
        return _project(self._connection.ask("DELETE", f"projects/{name}/invitations/{user}"))

    def set_manager(self, name: str, user: str, manager: bool = True) -> api.ProjectOut:
        """Make a member a manager, or a manager a member."""
        return _project(
            self._connection.ask("PATCH", f"projects/{name}/members/{user}", {"manager": manager})
        )

    def remove(self, name: str, user: str) -> None:
        """Take a user out of it; oneself: leave it. Jobs that run go on until they end."""
        self._connection.ask("DELETE", f"projects/{name}/members/{user}")

    def invitations(self) -> list[api.InvitationOut]:
        """Projects that I am invited to join."""
        return [api.InvitationOut.model_validate(each) for each in self._connection.ask("GET", "invitations")]

    def accept(self, invitation: api.InvitationOut) -> None:
        """Join."""
        self._connection.ask("POST", f"invitations/{invitation.number}", {"accept": True})

    def decline(self, invitation: api.InvitationOut) -> None:
        """Do not join."""
        self._connection.ask("POST", f"invitations/{invitation.number}", {"accept": False})


def _project(found: object) -> api.ProjectOut:
    return api.ProjectOut.model_validate(found)
