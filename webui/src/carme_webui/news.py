"""Telling open pages that something of their owner's has changed."""

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Iterable

__all__ = ["News", "news"]


class News:
    """What has changed for whom, for everybody who waits in this process.

    A version is a word that differs from the earlier one as soon as there is something new; one of another
    process (before a restart) differs from all.
    """

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)
        self._counts: Counter[str] = Counter()
        self._for_all = 0
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._lock = threading.Lock()

    def version(self, user: str) -> str:
        """What this user's pages show when they are made now."""
        return f"{self._epoch}-{self._for_all}-{self._counts[user]}"

    def tell(self, users: Iterable[str]) -> None:
        """Something of these users has changed. Any thread may say so."""
        with self._lock:
            for user in set(users):
                self._counts[user] += 1
                self._wake(user)

    def tell_all(self) -> None:
        """Something that all see has changed."""
        with self._lock:
            self._for_all += 1
            for user in list(self._waiting):
                self._wake(user)

    def _wake(self, user: str) -> None:
        for loop, event in self._waiting.pop(user, ()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def wait(self, user: str, seen: str, seconds: float) -> str:
        """The version, as soon as it differs from the one that was seen; after `seconds` at the latest."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self.version(user) != seen:
                return self.version(user)
            self._waiting.setdefault(user, set()).add(waiter)
        try:
            await asyncio.wait_for(waiter[1].wait(), seconds)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                if (waiting := self._waiting.get(user)) is not None:
                    waiting.discard(waiter)
                    if not waiting:
                        del self._waiting[user]
        return self.version(user)


news = News()
"""The news of this process."""
