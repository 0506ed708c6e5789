"""What an account needs before it can run jobs: an association in Slurm, and a home."""

import asyncio
from pathlib import Path

from carme.config import Settings
from carme.errors import CarmeError, SlurmError
from carme.slurm import Slurm, UnixAccount
from carme.slurm.programs import run


async def enrol(account: UnixAccount, slurm: Slurm, settings: Settings) -> list[str]:
    """Give an account what it lacks; right also when it lacks nothing.

    Returns:
        What had to be done, in words.

    Raises:
        SlurmError: Slurm refused, or is away.
        CarmeError: The home cannot be made.
    """
    done: list[str] = []
    default = settings.slurm.default_account
    try:
        if default and not await slurm.has_association(account.name):
            await slurm.add_member(default, account.name)
            done.append(f"added to the account {default} in Slurm")
    except SlurmError as error:
        if error.code != "no-accounting":
            raise
    if not await asyncio.to_thread(Path(account.home).exists):
        # A unit of its own does what PAM does at a first login: the broker may not give files away.
        made = await run("systemctl", "start", f"carme-home@{account.name}.service")
        if made.code:
            raise CarmeError(
                f"The home {account.home} cannot be made: {made.errors.strip()[:200] or 'no reason given'}.",
                f"Make it by hand; journalctl -u carme-home@{account.name} says more.",
                code="home",
            )
        done.append(f"made the home {account.home}")
    return done
