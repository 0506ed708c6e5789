"""Changes, numbered through, so that a peer can request what is new since its last request."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable


class Feed:
    """Numbers changes and wakes those who wait for one.

    A cursor is the feed's own random name and the number of a change. Whatever can change carries the number
    of its latest change, so "changed since" needs no history. `_floor` is the highest number that something
    forgotten took with it: older cursors get the full snapshot.
    """

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)
        self._change = 0
        self._floor = 0
        self._changed = asyncio.Condition()

    @property
    def cursor(self) -> str:
        """Where the next question begins."""
        return f"{self._epoch}-{self._change}"

    @property
    def change(self) -> int:
        """The number of the latest change."""
        return self._change

    def number(self) -> int:
        """A number for a new change. `notify` afterwards."""
        self._change += 1
        return self._change

    def forget(self, number: int) -> None:
        """Something whose latest change has this number is known no more."""
        self._floor = max(self._floor, number)

    def since(self, cursor: str | None) -> int | None:
        """The number in a cursor; None when it is too old to list all changes after it."""
        epoch, _, number = (cursor or "").partition("-")
        if epoch != self._epoch or not (number.isascii() and number.isdecimal()):
            return None
        return since if self._floor <= (since := int(number)) <= self._change else None

    async def notify(self) -> None:
        """Wake those who wait."""
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, since: int, seconds: float, changed: Callable[[], bool]) -> None:
        """Wait until something that the caller cares for has changed, at most so many seconds.

        Args:
            since: The number of the last change that the caller knows.
            changed: Whether one of the changes after it matters to the caller.
        """

        def has_changed() -> bool:
            return self._floor > since or (self._change > since and changed())

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(has_changed)
