"""Open WebSockets (kernels, terminals, apps): closed when those who opened them have signed out.

Every other request is let in anew each time, a WebSocket only when it is opened. So the hub says when a user
has signed out, and this server asks it which of the logins still count.
"""

import asyncio
from typing import Any
from weakref import WeakSet

from jupyter_server.auth.decorator import allow_unauthenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.events.handlers import SubscribeWebsocket
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.websocket import WebSocketHandler

#: "Policy violation", https://www.rfc-editor.org/rfc/rfc6455#section-7.4.1
SIGNED_OUT = 1008


class Connections:
    """The server's open WebSockets, and by whose login each was opened.

    Args:
        auth: JupyterHub's `HubOAuth`, which knows who sends a request.
    """

    def __init__(self, auth: Any) -> None:
        self._auth = auth
        self._open: WeakSet[WebSocketHandler] = WeakSet()
        self._lock = asyncio.Lock()
        self._watch()

    def _watch(self) -> None:
        """Notice every WebSocket: each class of handler ends up in Tornado's own `get`."""
        get, opened = WebSocketHandler.get, self._open

        async def noticed(handler: WebSocketHandler, *arguments: Any, **options: Any) -> None:
            opened.add(handler)
            await get(handler, *arguments, **options)

        WebSocketHandler.get = noticed  # type: ignore[method-assign]

    def listening(self) -> int:
        """How many pages of JupyterLab are open: each one listens to the server's events."""
        return sum(
            isinstance(handler, SubscribeWebsocket) and handler.ws_connection is not None
            for handler in list(self._open)
        )

    async def close_those_signed_out(self) -> None:
        """Ask the hub about every login with which a WebSocket is open; close those that count no more."""
        async with self._lock:
            # Answers from before somebody signed out say nothing now, for other requests neither.
            cache = self._auth.cache
            self._auth.cache = type(cache)(cache.max_age)
            by_login: dict[str, list[WebSocketHandler]] = {}
            for handler in list(self._open):
                if handler.ws_connection is not None and (token := self._auth.get_token(handler)):
                    by_login.setdefault(token, []).append(handler)
            for token, handlers in by_login.items():
                if await self._auth.user_for_token(token, sync=False) is None:
                    for handler in handlers:
                        handler.close(SIGNED_OUT, "Signed out.")


class LoginsHandler(JupyterHandler):
    """`POST carme/logins`: somebody may have signed out.

    Only the hub and, through the proxy, the session's owner get here, and all that they bring about is that
    this server asks the hub: so nobody needs to say who they are.
    """

    def initialize(self, connections: Connections) -> None:
        self.connections = connections

    def check_xsrf_cookie(self) -> None:
        """Nothing: see above."""

    @allow_unauthenticated
    async def post(self) -> None:
        try:
            await self.connections.close_those_signed_out()
        except web.HTTPError as error:
            self.log.warning("The hub does not report who is still signed in: %s", error)
            raise web.HTTPError(
                503, "The hub does not answer at the moment. Try again in a minute."
            ) from None
        self.set_status(204)
        self.finish()


def install(server: ServerApp, auth: Any) -> Connections:
    """Watch over the server's WebSockets."""
    connections = Connections(auth)
    options = {"connections": connections}
    server.web_app.add_handlers(
        ".*$", [(url_path_join(server.base_url, "carme/logins"), LoginsHandler, options)]
    )
    return connections
