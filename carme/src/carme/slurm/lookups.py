"""What a directory server may have to be queried about accounts: nobody else waits for that, nor for ever."""

import asyncio
import time
from typing import Any

from carme.errors import SlurmError
from carme.slurm.account import UnixAccount
from carme.translation import message as _

#: Seconds for the groups of an account.
IDENTITY_SECONDS = 30.0
#: Seconds for an account, where others wait meanwhile.
ACCOUNT_SECONDS = 1.0

#: Look-ups of accounts that go on, by name, and until when somebody waits for them by the monotonic clock.
#: Each holds a thread until the server answers, so there is one for a name.
_going_on: dict[str, tuple[asyncio.Task[UnixAccount], float]] = {}


async def identity_of(owner: UnixAccount) -> dict[str, Any]:
    """`UnixAccount.identity`. Raises SlurmError when there is no answer in time."""
    try:
        async with asyncio.timeout(IDENTITY_SECONDS):
            return await asyncio.to_thread(owner.identity)
    except TimeoutError:
        raise SlurmError(
            _("The groups of the account {name} cannot be read: no answer in time.", name=owner.name),
            _("Try again in a moment; if it stays so, tell an administrator."),
        ) from None


async def account_named(name: str) -> UnixAccount:
    """`UnixAccount.named`, for what looks accounts up again and again, such as the broker's poll.

    Raises:
        NotFound: There is no such account.
        SlurmError: There is no answer in time; while the look-up goes on, others for this name fail at once.
    """
    if name not in _going_on:
        task = asyncio.create_task(asyncio.to_thread(UnixAccount.named, name))
        _going_on[name] = task, time.monotonic() + ACCOUNT_SECONDS
        task.add_done_callback(lambda done: _forget(name, done))
    task, until = _going_on[name]
    await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
    if task.done():
        return task.result()
    raise SlurmError(
        _("The account {name} cannot be looked up: no answer in time.", name=name),
        _("Try again in a moment; if it stays so, tell an administrator."),
    )


def _forget(name: str, task: asyncio.Task[UnixAccount]) -> None:
    _going_on.pop(name, None)
    if not task.cancelled():
        task.exception()  # perhaps nobody waits for it any more
