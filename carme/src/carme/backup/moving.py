"""When the portal's or the hub's database may move from SQLite to PostgreSQL; each part copies its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from carme.backup.services import require_stopped
from carme.config import Settings
from carme.errors import CarmeError

__all__ = ["MoveRefused", "check_move", "refuse_filled"]

UNITS = {
    "hub": ("carme-hub",),
    "portal": ("carme-portal", "carme-sync", "carme-worker", "carme-beat"),
}


class MoveRefused(CarmeError):
    """A database was not moved, and nothing of the old or the new one has changed."""


def check_move(settings: Settings, part: Literal["hub", "portal"], target: str) -> Path:
    """The file of the database of SQLite that is to move.

    Args:
        target: The address of an empty database on a server, without a password: libpq takes that from
            PGPASSWORD or ~/.pgpass.

    Raises:
        CarmeError: It is on a server already, or not there; the address cannot be meant; services run.
    """
    address = settings.database(part)
    if not address.startswith("sqlite:////"):
        raise MoveRefused(
            f"The database of the {part} is on a server already.",
            f"'database' in [{part}] of carme.toml says where. Move it with pg_dump and pg_restore.",
        )
    file = Path(address.removeprefix("sqlite:///"))
    if not file.is_file():
        raise MoveRefused(
            f"There is no database {file}.", "Run this on the head, as the account of the service."
        )
    no_address = MoveRefused(
        f"{target!r} is not an address of a database on a server.",
        "Use one like postgresql:///NAME or postgresql://USER@HOST/NAME.",
    )
    try:
        parts = urlsplit(target)
        parts.port  # noqa: B018 (it is read then)
    except ValueError:
        raise no_address from None
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise MoveRefused(
            "The address holds a password, which other users of this host could read.",
            "Leave it out, and set PGPASSWORD instead.",
        )
    if parts.scheme != "postgresql" or not parts.path.strip("/"):
        raise no_address
    require_stopped(UNITS[part])
    return file


def refuse_filled(tables: Sequence[str]) -> None:
    """Raise MoveRefused where the new database has rows in these tables."""
    if tables:
        raise MoveRefused(
            f"The new database has rows already, in {', '.join(sorted(tables)[:5])}.",
            "Give an empty database. Nothing has been changed.",
        )
