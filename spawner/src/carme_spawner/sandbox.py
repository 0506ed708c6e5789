"""`python -m carme_spawner.sandbox`: JupyterHub and the site's front door in one process, for `./dev`.

On a site nginx and configurable-http-proxy lead browsers to the portal, the hub and sessions. A sandbox has
one small proxy in their place, which knows the hub's routes because it lives in the same process.
"""

import asyncio
import contextlib
import functools
import ssl
import sys
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import carme_spawner.schemas  # noqa: F401  # isort: skip  before JupyterHub
import aiohttp
from aiohttp import web
from jupyterhub.apihandlers import default_handlers
from jupyterhub.proxy import Proxy
from multidict import CIMultiDict
from tornado import web as web_errors
from yarl import URL

from carme.config import Settings, load
from carme.errors import CarmeError
from carme_spawner.hub import CarmeHub
from carme_spawner.hub_config import hub_config
from carme_spawner.names import ServerResolver
from carme_spawner.proxy import EndsServersFirst
from carme_spawner.ready import ReadyHandler, resolve

#: Headers that belong to one connection (RFC 9110, 7.6.1), and what each side of the proxy sets itself.
HOP_BY_HOP = frozenset(("connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"))
#: Of a WebSocket's handshake, which each side of the proxy makes anew.
HANDSHAKE = "sec-websocket-"
LARGEST_MESSAGE = 512 << 20


class LocalReadyHandler(ReadyHandler):
    """Takes servers of this computer: the nodes of a sandbox have no addresses of their own."""

    async def checked_address(self, host: str, spawner: Any) -> str:
        """The loopback's. Raises an error of HTTP where the server is elsewhere."""
        for address in await resolve(host):
            if ip_address(address).is_loopback:
                return address
        raise web_errors.HTTPError(400, f"Servers of a sandbox are on this computer, and {host} is not.")


class FrontDoor(EndsServersFirst, Proxy):
    """The hub's routes, and a server that follows them."""

    should_start = False
    #: Of this process: JupyterHub makes the proxy itself.
    routes: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    async def add_route(self, routespec: str, target: str, data: dict[str, Any]) -> None:
        """Lead addresses that begin with `routespec` to `target`."""
        self.routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec: str) -> None:
        """Forget a route; also right when there is none."""
        self.routes.pop(routespec, None)

    async def get_all_routes(self) -> dict[str, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """All of them."""
        return dict(self.routes)


class Front:
    """Leads requests to the portal, the hub or a session.

    Args:
        settings: The site's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen at the site's address for as long as this is entered. Raises OSError."""
        connector = aiohttp.TCPConnector(resolver=ServerResolver(), limit=0)
        # Of sessions' servers: they come with cookies of their own.
        self._client = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, auto_decompress=False)
        await runner.setup()
        site = urlsplit(self._settings.site.url)
        try:
            await web.TCPSite(runner, site.hostname, site.port, shutdown_timeout=1).start()
            yield
        finally:
            await runner.cleanup()
            await self._client.close()

    def _target(self, path: str) -> str:
        """Where an address leads."""
        if path.startswith(self._settings.hub.base_path):
            fitting = [spec for spec in FrontDoor.routes if f"{path}/".startswith(spec)]
            if fitting:
                return FrontDoor.routes[max(fitting, key=len)]["target"]
            return self._settings.hub.listen
        return f"http://{self._settings.portal.listen}"

    @functools.cached_property
    def _certificate(self) -> ssl.SSLContext:
        """The proxy's, with which it shows itself to the hub and to sessions."""
        folder = self._settings.hub.state_directory / "certificates"
        context = ssl.create_default_context(cafile=str(folder / "proxy-client-ca_trust.crt"))
        context.load_cert_chain(
            folder / "proxy-client/proxy-client.crt", folder / "proxy-client/proxy-client.key"
        )
        return context

    def _tls(self, target: str) -> ssl.SSLContext | bool:
        return self._certificate if target.startswith("https") else False

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        target = self._target(request.path)
        parts = urlsplit(target)
        url = f"{parts.scheme}://{parts.netloc}{request.raw_path}"
        headers = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in HOP_BY_HOP and not name.lower().startswith(HANDSHAKE)
        )
        headers["X-Forwarded-Proto"], headers["X-Forwarded-Host"] = "http", request.host
        headers["X-Forwarded-For"] = request.remote or ""
        try:
            if request.headers.get("upgrade", "").lower() == "websocket":
                return await self._websocket(request, url, headers, self._tls(target))
            return await self._http(request, url, headers, self._tls(target))
        except (aiohttp.ClientError, OSError) as error:
            return web.Response(status=503, text=f"The service behind does not answer now: {error}\n")

    async def _http(
        self, request: web.Request, url: str, headers: CIMultiDict[str], tls: ssl.SSLContext | bool
    ) -> web.StreamResponse:
        assert self._client
        async with self._client.request(
            request.method,
            URL(url, encoded=True),
            headers=headers,
            data=request.content if request.body_exists else None,
            allow_redirects=False,
            ssl=tls,
        ) as found:
            answer = web.StreamResponse(status=found.status, reason=found.reason)
            for name, value in found.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    answer.headers.add(name, value)
            await answer.prepare(request)
            with contextlib.suppress(ConnectionError):  # the browser has left
                async for part in found.content.iter_any():
                    await answer.write(part)
                await answer.write_eof()
            return answer

    async def _websocket(
        self, request: web.Request, url: str, headers: CIMultiDict[str], tls: ssl.SSLContext | bool
    ) -> web.StreamResponse:
        assert self._client
        wanted = [word.strip() for word in request.headers.get("sec-websocket-protocol", "").split(",")]
        async with self._client.ws_connect(
            URL(url, encoded=True),
            headers=headers,
            protocols=[word for word in wanted if word],
            max_msg_size=LARGEST_MESSAGE,
            ssl=tls,
        ) as server:
            chosen = [server.protocol] if server.protocol else []
            browser = web.WebSocketResponse(protocols=chosen, max_msg_size=LARGEST_MESSAGE)
            await browser.prepare(request)
            ways = [asyncio.create_task(_pass_on(*way)) for way in ((browser, server), (server, browser))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await browser.close()
        return browser


async def _pass_on(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    to: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> None:
    async for message in source:
        if message.type is aiohttp.WSMsgType.TEXT:
            await to.send_str(message.data)
        elif message.type is aiohttp.WSMsgType.BINARY:
            await to.send_bytes(message.data)


class SandboxHub(CarmeHub):
    """The site's hub with the front door."""

    async def start(self) -> None:
        """Open the door first: the portal is behind it, and the hub needs some seconds."""
        self._front = contextlib.AsyncExitStack()
        await self._front.enter_async_context(Front(self.config.CarmeSpawner.settings).listening())
        await super().start()

    async def shutdown_cancel_tasks(self, sig: Any = None) -> None:
        """Close the door."""
        await self._front.aclose()
        await super().shutdown_cancel_tasks(sig)


def main() -> None:
    """Run the hub until it is ended by a signal."""
    try:
        settings = load()
        config = hub_config(settings)
    except CarmeError as error:
        sys.exit(f"carme_spawner.sandbox: {error}")
    default_handlers[:] = [
        (path, LocalReadyHandler if handler is ReadyHandler else handler)
        for path, handler in default_handlers
    ]
    config.JupyterHub.proxy_class = FrontDoor
    config.JupyterHub.log_level = "WARN"
    config.JupyterHub.pid_file = str(Path(settings.hub.state_directory) / "hub.pid")
    SandboxHub.instance(config=config)
    SandboxHub.launch_instance([])


if __name__ == "__main__":
    main()
