"""Resources that all users share, so that no user takes all of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from carme.errors import CarmeError
from carme.translation import message as _


class ConcurrencyLimit:
    """So many places, and at most some of them for one user at a time; further requests wait.

    Args:
        places: For all users together.
        each: For one user.
        patience: Seconds for which a request waits; None: for as long as it takes. Clients give up, and what
            is done for one that has given up may be requested again.
    """

    def __init__(self, places: int, each: int, patience: float | None = None) -> None:
        self._all = asyncio.Semaphore(places)
        self._each = each
        self._patience = patience
        # A user's own places are forgotten as soon as nobody holds or wants one.
        self._own: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def slot(self, uid: int) -> AsyncIterator[None]:
        """Hold one of the places of the user with this number.

        Raises:
            CarmeError: None became free in time.
        """
        own = self._own.get(uid) or asyncio.Semaphore(self._each)
        self._own[uid] = own
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._patience):
                    await held.enter_async_context(own)
                    await held.enter_async_context(self._all)
            except TimeoutError:
                raise CarmeError(
                    _("Too many requests of the same kind are still being worked on."),
                    _("Try again in a moment."),
                    code="busy",
                ) from None
            yield
