"""From the browser to an app's Unix socket and back: requests, answers and WebSockets as they were sent.

jupyter-server-proxy brings the login, and addresses that are pages and WebSockets. What it passes on it would
quote again, hold in memory, and limit. Here only the headers about one connection are changed.
"""

import asyncio
import string
from collections.abc import AsyncIterator, Coroutine
from html import escape
from http import HTTPStatus
from http.client import responses
from typing import Any, cast
from urllib.parse import quote, urlsplit

import aiohttp
from jupyter_server.utils import url_path_join
from jupyter_server_proxy.handlers import LocalProxyHandler
from multidict import CIMultiDict
from tornado import httputil, web
from tornado.http1connection import HTTP1Connection
from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError
from yarl import URL

from carme.translation import language_shown, message, translated
from carme_spawner.singleuser.programs import AppFailed, Programs

PAGE = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; max-width: 50rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ background: #f3f3f3; color: #222; padding: 1rem; overflow: auto }}</style></head>
<body><main><h1>{title}</h1><p>{what}</p><p>{remedy}</p>{lines}</main></body></html>
"""

#: Headers about one connection, not about what is sent: https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1
OF_CONNECTION = frozenset(
    {
        *("connection", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
    }
)
OF_WEBSOCKET = "sec-websocket-"
#: aiohttp would add these where the browser sent none.
ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
#: Bytes of one header that an app may send.
LARGEST_HEADER = 1 << 17
#: Bytes of a request: they go to the app as they come, so it may be any number.
LARGEST_REQUEST = 1 << 50
#: Codes with which a WebSocket may be closed by a program: https://www.rfc-editor.org/rfc/rfc6455#section-7.4
CLOSING = {1000, 1001, 1002, 1003, *range(1007, 1015), *range(3000, 5000)}


@web.stream_request_body
class AppProxy(LocalProxyHandler):
    """One app; the address's parts are its name and what it sees as path."""

    _client: aiohttp.ClientSession | None = None
    _sending: asyncio.Task[aiohttp.ClientResponse] | None = None
    _channel: aiohttp.ClientWebSocketResponse | None = None

    def __init__(self, *arguments: Any, programs: Programs, prefix: str, **options: Any) -> None:
        self.programs = programs
        self._tasks: set[asyncio.Task[Any]] = set()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        #: Nobody reads what the browser still sends.
        self._unread = asyncio.Event()
        super().__init__(*arguments, **options)
        self.proxy_base = prefix

    # --- requests ------------------------------------------------------------------------------------------

    async def prepare(self, *arguments: Any, **options: Any) -> None:
        """Let the owner in, and begin to pass the request on: its body is still on the way."""
        await super().prepare(*arguments, **options)
        if self._finished:
            return
        if not self.path_args[1] or self._is_websocket():
            self._unread.set()
        else:
            cast(HTTP1Connection, self.request.connection).set_max_body_size(LARGEST_REQUEST)
            self._sending = self._begin(self._send())
            self._sending.add_done_callback(self._sent)

    async def data_received(self, chunk: bytes) -> None:
        """A part of the body: the next one is read when the app has taken it."""
        await self._add(chunk)

    async def proxy(self, port: str, proxied_path: str) -> Any:
        """The app's answer. What the base class calls port is the app's name."""
        if not proxied_path:
            query = f"?{self.request.query}" if self.request.query else ""
            return self.redirect(f"{self.request.path}/{query}")
        assert self._sending is not None
        try:
            self._record_activity()
            await self._add(None)
            async with await self._sending as answer:
                await self._pass_on(answer)
        except AppFailed as error:
            self._explain(error)
        except (aiohttp.ClientError, OSError) as error:
            self._explain(self._broken(port, error))
        finally:
            self._record_activity()
            await self._close_connections()

    def on_connection_close(self) -> None:
        """The browser has gone: the app must notice."""
        if self._sending:
            self._sending.cancel()
            self._begin(self._close_connections())
        super().on_connection_close()

    async def _send(self) -> aiohttp.ClientResponse:
        """Send the request; the answer's beginning."""
        client = await self._open_client()
        has_body = "Content-Length" in self.request.headers or "Transfer-Encoding" in self.request.headers
        return await client.request(
            self.request.method or "GET",
            self._address(),
            headers=self._headers_for_app(),
            data=self._body() if has_body else None,
            allow_redirects=False,
        )

    def _sent(self, sending: asyncio.Task[aiohttp.ClientResponse]) -> None:
        if sending.cancelled() or sending.exception():
            self._unread.set()

    async def _add(self, chunk: bytes | None) -> None:
        """Put a part of the body where the app gets it from; None is its end."""
        adding = asyncio.ensure_future(self._parts.put(chunk))
        unread = asyncio.ensure_future(self._unread.wait())
        await asyncio.wait({adding, unread}, return_when=asyncio.FIRST_COMPLETED)
        adding.cancel()
        unread.cancel()

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            while (chunk := await self._parts.get()) is not None:
                yield chunk
        finally:
            # Also where an app answers and closes before it has read everything.
            self._unread.set()

    async def _pass_on(self, answer: aiohttp.ClientResponse) -> None:
        """Send the app's answer to the browser, as it comes."""
        self._headers = httputil.HTTPHeaders()
        # Jupyter Server would compress it, parts of files too.
        self._transforms = []
        self.set_status(answer.status, answer.reason or responses.get(answer.status, "Unknown"))
        for name, value in _end_to_end_headers(answer.headers.items()):
            self.add_header(name, self._moved(value) if name.lower() == "location" else value)
        try:
            # The base class's own `flush` returns nothing to wait for.
            await web.RequestHandler.flush(self)
            async for part in answer.content.iter_any():
                self.write(part)
                await web.RequestHandler.flush(self)
            self.finish()
        except StreamClosedError:
            self.log.debug("The browser has gone before the end of %s.", self.request.path)
        except aiohttp.ClientError as error:
            # The beginning is sent: that the end is missing only a broken connection says.
            self.log.warning("The app broke off its answer to %s: %s", self.request.path, error)
            if stream := cast(HTTP1Connection, self.request.connection).stream:
                stream.close()

    # --- WebSockets ----------------------------------------------------------------------------------------

    async def get(self, *arguments: str, **options: str) -> None:
        """A page, or a WebSocket, which is accepted when the app has accepted it, and in the app's words."""
        if self._is_websocket():
            origin = self.request.headers.get("Origin")
            if origin is not None and not self.check_origin(origin):
                raise web.HTTPError(403, "Cross origin websockets not allowed")
            self._channel = await self._connect(arguments[0])
        try:
            await super().get(*arguments, **options)
        finally:
            if self._channel and self.ws_connection is None:
                await self._close_connections()

    async def open(self, port: str, proxied_path: str) -> Any:
        """The browser's side is open, too."""
        self._record_activity()
        self._begin(self._receive())

    async def on_message(self, message: str | bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """From the browser to the app; the next is read when the app has taken it."""
        self._record_activity()
        assert self._channel is not None
        try:
            if isinstance(message, str):
                await self._channel.send_str(message)
            else:
                await self._channel.send_bytes(message)
        except (aiohttp.ClientError, OSError):
            self.close()

    def on_ping(self, data: bytes) -> None:
        """Each side is answered by its neighbour, which is here."""
        self._record_activity()

    def on_close(self) -> None:
        """The browser has closed it."""
        self._begin(self._close_connections())

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        """The one that the app took."""
        return self._channel.protocol if self._channel else None

    async def _connect(self, name: str) -> aiohttp.ClientWebSocketResponse:
        requested = ",".join(self.request.headers.get_list("Sec-WebSocket-Protocol"))
        try:
            client = await self._open_client()
            return await client.ws_connect(
                self._address(),
                protocols=[word.strip() for word in requested.split(",") if word.strip()],
                headers=self._headers_for_app(),
                max_msg_size=0,
            )
        except aiohttp.WSServerHandshakeError as error:
            await self._close_connections()
            refused = error.status >= HTTPStatus.BAD_REQUEST
            raise web.HTTPError(error.status if refused else 502, "The app refused the WebSocket.") from None
        except AppFailed as error:
            raise web.HTTPError(502, str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            await self._close_connections()
            raise web.HTTPError(502, str(self._broken(name, error))) from None

    async def _receive(self) -> None:
        """From the app to the browser, until one of them has closed."""
        assert self._channel is not None
        code, reason = None, ""
        try:
            while True:
                message = await self._channel.receive()
                if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    code = self._channel.close_code
                    reason = message.extra if isinstance(message.extra, str) else ""
                    break
                self._record_activity()
                await self.write_message(message.data, binary=message.type is aiohttp.WSMsgType.BINARY)
        except WebSocketClosedError:
            pass
        self.close(code if code in CLOSING else None, reason or None)

    # --- both ----------------------------------------------------------------------------------------------

    def _is_websocket(self) -> bool:
        return self.request.method == "GET" and self.request.headers.get("Upgrade", "").lower() == "websocket"

    async def _open_client(self) -> aiohttp.ClientSession:
        """What asks the app, which is started if it does not run. Raises AppFailed."""
        path = await self.programs.socket_of(self.path_args[0])
        self._client = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(path), force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
            skip_auto_headers=ADDED,
            auto_decompress=False,
            max_line_size=LARGEST_HEADER,
            max_field_size=LARGEST_HEADER,
        )
        return self._client

    def _address(self) -> URL:
        """What the app sees, quoted as the browser quoted it."""
        # Tornado shows the bytes of an address as characters. Those that may not stand there are quoted.
        path = quote(self.path_args[1].encode("latin-1"), safe=string.punctuation)
        query = quote(self.request.query.encode("latin-1"), safe=string.punctuation)
        return URL(f"http://localhost{path}{'?' if query else ''}{query}", encoded=True)

    def _public_address(self) -> str:
        """The address under which browsers see the app."""
        return url_path_join(self.base_url, self.proxy_base)

    def _headers_for_app(self) -> CIMultiDict[str]:
        passed = CIMultiDict(_end_to_end_headers(self.request.headers.get_all()))
        # By these, apps know where they are: those of Jupyter, and those of Flask and its like.
        for name in ("X-Forwarded-Context", "X-ProxyContextPath", "X-Forwarded-Prefix"):
            passed[name] = self._public_address()
        return passed

    def _moved(self, location: str) -> str:
        """Where an app sends a browser: below its place, unless it knows that place or means another site."""
        place, parts = self._public_address(), urlsplit(location)
        inside = parts.path == place or parts.path.startswith(f"{place}/")
        return location if parts.netloc or parts.path[:1] != "/" or inside else place + location

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _close_connections(self) -> None:
        """Close what is open to the app."""
        self._unread.set()
        if self._channel:
            code = self.close_code if self.close_code in CLOSING else 1001
            await self._channel.close(code=code, message=(self.close_reason or "").encode())
        if self._client:
            await self._client.close()

    def _broken(self, name: str, error: Exception) -> AppFailed:
        return AppFailed(
            message(
                "The app {name} did not answer properly: {reason}.",
                name=name,
                reason=str(error) or type(error).__name__,
            ),
            message("Load this page again. If it fails again, see the app's own messages."),
        )

    def _explain(self, error: AppFailed) -> None:
        """Say what failed, in a page."""
        self.set_status(502)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        lines = f"<pre>{escape(error.lines)}</pre>" if error.lines else ""
        title = message("App not available")
        shown = {"title": title, "what": error.what, "remedy": error.remedy}
        words = {name: escape(translated(text)) for name, text in shown.items()}
        self.finish(PAGE.format(language=language_shown(title), lines=lines, **words))


def _end_to_end_headers(headers: Any) -> list[tuple[str, str]]:
    """The headers that are about more than one connection, and not about a WebSocket's own."""
    found = [(str(name), str(value)) for name, value in headers]
    named = {
        word.strip().lower()
        for name, value in found
        if name.lower() == "connection"
        for word in value.split(",")
    }
    return [
        (name, value)
        for name, value in found
        if name.lower() not in OF_CONNECTION | named and not name.lower().startswith(OF_WEBSOCKET)
    ]
