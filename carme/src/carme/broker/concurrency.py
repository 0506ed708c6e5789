"""Resources that all users share, of which none may take all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class ConcurrencyLimit:
    """So many places, of which one user has at most some at a time; who wants more waits.

    Args:
        places: For all users together.
        each: For one user.
    """

    def __init__(self, places: int, each: int) -> None:
        self._all = asyncio.Semaphore(places)
        self._each = each
        # A user's own places are forgotten as soon as nobody holds or wants one.
        self._own: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def take(self, uid: int) -> AsyncIterator[None]:
        """Hold one of the places of the user with this number."""
        own = self._own.get(uid) or asyncio.Semaphore(self._each)
        self._own[uid] = own
        async with own, self._all:
            yield
