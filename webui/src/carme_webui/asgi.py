"""The portal as an ASGI application: Django's pages, nginx's question who may enter, and the keeper."""

import os
import warnings
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler

__all__ = ["application"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

# Whitenoise's small static files may well be read at once.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

django.setup(set_prefix=False)


class Pages(ASGIHandler):
    """Django's handler, with one change of threads for a request instead of one for each middleware.

    Nearly all views and middlewares are plain functions. Django would call each from the event loop, and
    each would wait for its turn to run again. Here the whole chain runs in the request's thread, and a view
    that is a coroutine runs in the event loop from there.
    """

    def load_middleware(self, is_async: bool = False) -> None:
        """Build the chain of plain functions."""
        super().load_middleware(is_async=False)
        self._middleware_chain = sync_to_async(self._middleware_chain, thread_sensitive=True)


pages = Pages()

from carme_webui.accounts.entrance import enter  # noqa: E402  Django must be set up
from carme_webui.keeper import Keeper  # noqa: E402

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """One connection."""
    if scope["type"] == "lifespan":
        await _live(receive, send)
    elif scope["type"] == "http" and scope["path"] == "/internal/enter":
        await enter(scope, send)
    else:
        await pages(scope, receive, send)  # pyright: ignore[reportArgumentType]  the same types, named otherwise


async def _live(receive: Receive, send: Send) -> None:
    """Keep the portal true from the server's start to its end."""
    keeper = Keeper()
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            keeper.start()
            await send({"type": "lifespan.startup.complete"})
        else:
            keeper.stop()
            await send({"type": "lifespan.shutdown.complete"})
            return
