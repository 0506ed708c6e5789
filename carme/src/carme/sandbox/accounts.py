"""The sandbox's users, who are all the one user that runs it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carme.errors import ConfigError
from carme.slurm.account import UnixAccount

__all__ = ["SandboxAccount", "accounts_in"]

#: The number of the first; the system has no accounts with such numbers.
FIRST_UID = 2_000_000


@dataclass(frozen=True)
class SandboxAccount(UnixAccount):
    """An account that the system does not know; what runs as it runs as the user who started the sandbox."""

    def groups(self) -> list[str]:
        """A group of its own."""
        return [self.name]

    def identity(self) -> dict[str, Any]:
        """Nothing: a child stays who we are."""
        return {}


def accounts_in(homes: Path) -> list[SandboxAccount]:
    """One account for each folder in a folder of homes, in the order of their names.

    Raises:
        ConfigError: There is no such folder.
    """
    if not homes.is_dir():
        raise ConfigError(f"There is no sandbox in {homes.parent}.", "Make one with ./dev.")
    names = sorted(path.name for path in homes.iterdir() if path.is_dir())
    return [
        SandboxAccount(name, FIRST_UID + number, FIRST_UID + number, str(homes / name))
        for number, name in enumerate(names)
    ]
