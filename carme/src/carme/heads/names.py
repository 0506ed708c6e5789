"""Which of the site's heads this host is."""

from __future__ import annotations

import socket

from carme.config import Settings
from carme.errors import ConfigError

__all__ = ["own_name", "require_two_heads"]


def require_two_heads(settings: Settings) -> None:
    """Raises ConfigError where the site has one head, or databases that only one host can open."""
    if len(settings.heads.names) < 2:
        raise ConfigError(
            "This site has one head: [heads] of carme.toml names no second one.",
            "Put a second host into the group 'head' of the inventory: see docs/admins/two-heads.md.",
        )
    for name, address in {"hub": settings.hub.database, "portal": settings.portal.database}.items():
        if not address.startswith("postgresql"):
            raise ConfigError(
                f"The database of the {name} is a file of this head, which the other head cannot open.",
                f"Set carme_{name}_database to a PostgreSQL server that both heads reach.",
            )


def own_name(settings: Settings) -> str:
    """The name in `[heads]` of the host that this runs on. Raises ConfigError if none of them is."""
    full = socket.gethostname()
    short = full.partition(".")[0]
    for accepted in ({full}, {full, short}):
        for name in settings.heads.names:
            if name in accepted:
                return name
    for name in settings.heads.names:
        if name.partition(".")[0] == short:
            return name
    raise ConfigError(
        f"This host is {full}, but [heads] of carme.toml names {', '.join(settings.heads.names)}.",
        "Give the host one of these names, or correct 'names' of [heads].",
    )
