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
        # What PAM runs at a first login: it copies /etc/skel, and gives it to the account.
        made = await run("/sbin/mkhomedir_helper", account.name, "0077")
        if made.code:
            raise CarmeError(
                f"The home {account.home} cannot be made: {made.errors.strip()[:200] or 'no reason given'}.",
                "Make it by hand, or see whether the file system is mounted.",
                code="home",
            )
        done.append(f"made the home {account.home}")
    return done
