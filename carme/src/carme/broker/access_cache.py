"""What Slurm lets each user use, queried from its database at most once a minute for each of them."""

import asyncio
import logging
import time

from carme.errors import CarmeError
from carme.jobs import Access
from carme.slurm import Slurm, UnixAccount

__all__ = ["AccessCache"]

_log = logging.getLogger("carme.broker")

CACHE_SECONDS = 60.0
RETRY_SECONDS = 10.0
MOST_USERS = 4096  # that are remembered


class AccessCache:
    """Remembers associations, groups and limits of users; without accounting only groups are known."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._known: dict[str, tuple[float, Access]] = {}
        self._turn = asyncio.Lock()

    async def of(self, account: UnixAccount) -> Access:
        """What a user may use, as it was within the last minute. Never raises for Slurm's sake."""
        until, access = self._known.get(account.name, (0.0, None))
        if access is not None and time.monotonic() < until:
            return access
        # Not in turn: a directory server that is slow for one user must not hold others up.
        groups = await asyncio.to_thread(account.groups)
        async with self._turn:  # one question at a time to the database
            until, access = self._known.get(account.name, (0.0, None))
            if access is not None and time.monotonic() < until:
                return access
            try:
                found, seconds = await self._ask(account.name, groups), CACHE_SECONDS
            except CarmeError as error:
                if error.code != "no-accounting":
                    _log.warning("What %s may use in Slurm is not known: %s", account.name, error)
                found, seconds = access or Access(user=account.name, groups=groups), RETRY_SECONDS
            if len(self._known) >= MOST_USERS:
                self._known.clear()
            self._known[account.name] = time.monotonic() + seconds, found
            return found

    def forget(self) -> None:
        """Ask anew: what users may use has just changed."""
        self._known.clear()

    async def _ask(self, user: str, groups: list[str]) -> Access:
        associations = await self._slurm.associations(user)
        enforced = await self._slurm.enforcement() if associations else []
        limits = await self._slurm.limits([user]) if "limits" in enforced else []
        return Access(user=user, groups=groups, associations=associations, enforced=enforced, limits=limits)
