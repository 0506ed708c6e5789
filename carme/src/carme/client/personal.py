"""Presets of sessions, and the portal's notices, from a program."""

from __future__ import annotations

from typing import Any

from carme import api
from carme.client.connection import Connection
from carme.client.pages import items
from carme.client.sessions import Session
from carme.errors import NotFound
from carme.translation import message as _

__all__ = ["Notices", "Presets"]


class Presets:
    """Options of sessions that I start often."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> list[api.PresetOut]:
        """All of them by name; `link` opens the portal's form filled in."""
        return [api.PresetOut.model_validate(each) for each in self._connection.ask("GET", "presets")]

    def get(self, name: str) -> api.PresetOut:
        """The one of this name. Raises NotFound."""
        for each in self.list():
            if each.name == name:
                return each
        raise NotFound(_("You have no preset {name!r}.", name=name), _("See the list of your presets."))

    def save(self, name: str, **options: Any) -> api.PresetOut:
        """Remember options, in place of those of the same name.

        Args:
            options: As of `carme.jobs.SessionOptions`: `image`, `minutes`, `gpus_per_node`, `nodes`, ...

        Raises:
            InvalidRequest: They are not possible, or there are too many presets.
        """
        requested = {"name": name, "options": options}
        return api.PresetOut.model_validate(self._connection.ask("POST", "presets", requested))

    def start(self, name: str) -> Session:
        """Start a session with them. Raises as `Sessions.start` does, and NotFound."""
        options = self.get(name).options.model_dump(mode="json")
        found = self._connection.ask("POST", "sessions", options)
        return Session(self._connection, api.SessionOut.model_validate(found))

    def delete(self, name: str) -> None:
        """Forget it. Raises NotFound."""
        self._connection.ask("DELETE", f"presets/{self.get(name).number}")


class Notices:
    """The portal's notices to me."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self, *, unread: bool | None = None, limit: int | None = 50) -> list[api.NoticeOut]:
        """The latest first.

        Args:
            unread: Those that wait to be read, those that do not, or all (None).
            limit: How many at most; None: all.
        """
        found = items(self._connection, "notices", limit, unread=unread)
        return [api.NoticeOut.model_validate(each) for each in found]

    def read(self) -> None:
        """I have read all of them."""
        self._connection.ask("POST", "notices/read")

    def kinds(self) -> list[api.NoticeKind]:
        """The kinds of notices, and how I want to get them."""
        return [api.NoticeKind.model_validate(each) for each in self._connection.ask("GET", "notices/kinds")]

    def choose(self, kind: str, *, page: bool, mail: bool) -> api.NoticeKind:
        """Choose whether I get such notices on pages, and by mail. Raises InvalidRequest for no kind."""
        found = self._connection.ask("PUT", f"notices/kinds/{kind}", {"page": page, "mail": mail})
        return api.NoticeKind.model_validate(found)
