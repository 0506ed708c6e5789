"""The portal as an ASGI application: Django's pages, and nginx's question who may enter."""

import asyncio
import contextvars
import functools
import os
import warnings
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
from django.conf import settings
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.db import close_old_connections
from django.http import FileResponse
from django.http.response import HttpResponseBase
from django.template.loader import get_template
from django.urls import get_resolver, set_script_prefix

from carme.garbage import collect_rarely

__all__ = ["application", "worker"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

# Whitenoise's small static files may well be read at once.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

django.setup(set_prefix=False)


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Pages(ASGIHandler):
    """Django's handler, which makes a page from beginning to end in one of a few threads that stay.

    Django makes a thread for each request, changes threads at each signal, middleware and view, and keeps the
    thread, with its connection to the database, until a stream has ended: each open page has one. All of the
    portal's views are plain functions; what a stream sends is made in the event loop.

    With Django's own handler 19 requests of `./test bench portal --quick` (50 users, 2 cores, PostgreSQL)
    get no connection of the pool within 10 s and are answered with 500; with this one none. Without it an
    answer costs 0.2 to 1.2 ms more of processor time (of 4 to 10 ms), and up to 2.4 ms more where eight are
    made at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(settings.PAGE_THREADS, thread_name_prefix="page")

    def load_middleware(self, is_async: bool = False) -> None:
        """Build the chain of plain functions."""
        super().load_middleware(is_async=False)

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        try:
            response = await self._in_thread(self._make, scope, body)
            if not response.streaming:
                await self.send_response(response, send)
                return
            try:
                await self._stream(response, receive, send)
            finally:
                await self._in_thread(response.close)
        finally:
            body.close()

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        call = functools.partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _make(self, scope: Any, body: Any) -> HttpResponseBase:
        """The answer, after which this thread holds no connection to the database."""
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=self.__class__, scope=scope)
        request, refusal = self.create_request(scope, body)
        response: Any = refusal if request is None else self.get_response(request)
        response._handler_class = self.__class__
        if response.streaming:
            close_old_connections()
            if isinstance(response, FileResponse):
                response.block_size = self.chunk_size
        else:
            response.close()
        return response

    async def _stream(self, response: HttpResponseBase, receive: Any, send: Any) -> None:
        """Send what the response brings, until its end or until nobody listens any more."""
        sending = asyncio.create_task(self.send_response(response, send))
        leaving = asyncio.create_task(self._left(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


pages = Pages()

from carme_webui.accounts.entrance import enter  # noqa: E402  Django must be set up


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """One connection."""
    if scope["type"] == "http" and scope["path"] == "/internal/enter":
        await enter(scope, send)
    else:
        await pages(scope, receive, send)  # pyright: ignore[reportArgumentType]  the same types, named otherwise


def worker() -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The application of a process that does nothing else, with all that first requests would wait for."""
    get_resolver().url_patterns  # noqa: B018  reads the views
    templates = settings.BASE_DIR / "templates"
    for file in templates.rglob("*.html"):
        get_template(str(file.relative_to(templates)))
    collect_rarely()
    return application
