"""What an account needs before it can run jobs: an association in Slurm, a home, and its quotas."""

import asyncio
from pathlib import Path

from carme.config import Settings
from carme.errors import CarmeError, SlurmError
from carme.slurm import Slurm, UnixAccount
from carme.slurm.programs import run
from carme.translation import message as _
from carme.wording import listing


async def enrol(account: UnixAccount, slurm: Slurm, settings: Settings) -> list[str]:
    """Give an account what it lacks; right also when it lacks nothing.

    Returns:
        What had to be done, in words.

    Raises:
        SlurmError: Slurm refused, or is away.
        CarmeError: The home cannot be made, or the quotas cannot be set.
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
        # What PAM does at a first login: the broker may not give files away.
        failure = _("The home {home} cannot be made", home=account.home)
        await _unit("home", account.name, failure, _("Make it by hand"))
        done.append(f"made the home {account.home}")
    if settings.quotas:
        places = listing([str(path) for path in settings.quotas])
        failure = _("The quotas on {places} cannot be set", places=places)
        await _unit("quota", account.name, failure, _("Set them by hand"))
        done.append(f"saw to the quotas on {places}")
    return done


async def _unit(what: str, name: str, failure: str, remedy: str) -> None:
    """Have a unit of systemd do what the broker itself may not. Raises CarmeError."""
    unit = f"carme-{what}@{name}"
    done = await run("systemctl", "start", f"{unit}.service")
    if done.code:
        reason = done.errors.strip()[:200] or "no reason given"
        raise CarmeError(
            _("{failure}: {reason}.", failure=failure, reason=reason),
            _("{remedy}. 'journalctl -u {unit}' has the details.", remedy=remedy, unit=unit),
            code=what,
        )
