"""The portal as an ASGI application: Django's pages, nginx's question who may enter, and the keeper."""

import os
import warnings
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from django.core.asgi import get_asgi_application

__all__ = ["application"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

# Whitenoise's small static files may well be read at once.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

pages = get_asgi_application()

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
