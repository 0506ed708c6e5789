"""The portal as an ASGI application: Django's pages, and nginx's question who may enter."""

import os
import warnings
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from django.core.asgi import get_asgi_application

__all__ = ["application"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

# Whitenoise's small static files may well be read at once.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

pages = get_asgi_application()

from carme_webui.accounts.entrance import enter  # noqa: E402  Django must be set up


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """One connection."""
    if scope["type"] == "http" and scope["path"] == "/internal/enter":
        await enter(scope, send)
    else:
        await pages(scope, receive, send)  # pyright: ignore[reportArgumentType]  the same types, named otherwise
