"""Resources that all users share, so that no user takes all of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class ConcurrencyLimit:
    """So many places, and at most some of them for one user at a time; further requests wait.

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
    async def slot(self, uid: int) -> AsyncIterator[None]:
        """Hold one of the places of the user with this number."""
        own = self._own.get(uid) or asyncio.Semaphore(self._each)
        self._own[uid] = own
        async with own, self._all:
            yield
