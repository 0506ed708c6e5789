"""What servers and the portal call at the hub besides JupyterHub's own API."""

import re
from html import escape
from http import HTTPStatus
from typing import Any

from jupyterhub.apihandlers import default_handlers
from jupyterhub.handlers import default_handlers as pages
from jupyterhub.handlers.base import BaseHandler, UserUrlHandler
from jupyterhub.handlers.pages import ProxyErrorHandler, SpawnPendingHandler
from tornado import web

from carme_spawner.activity import ActivityHandler, ExtendHandler
from carme_spawner.logins import LoginsHandler
from carme_spawner.ready import ReadyHandler

__all__ = ["EndedServer", "EndedStart", "SilentServer", "StartsAtPortal", "install"]

#: A session's name, as the portal makes it.
_SESSION = re.compile(r"s[0-9a-z]{8}")
#: The address of a session's server, with that name.
_SERVER = re.compile(r"/user/[^/?]+/(s[0-9a-z]{8})(?:[/?]|$)")


def _portal_page(handler: BaseHandler, session: str) -> str:
    """The address of a session's page at the portal, or of the portal where this is no session's name."""
    portal = str(handler.app.default_url)
    return f"{portal}sessions/{session}/" if _SESSION.fullmatch(session) else portal


class StartsAtPortal(BaseHandler):
    """Leads to the portal from JupyterHub's own pages that offer a start, or make one right away.

    These are the hub's home page and `/spawn`. Their starts would have neither the options nor the limits of
    the portal's form, and the portal would not show them. Who is not signed in signs in first, as before.
    """

    @web.authenticated
    def get(self, user_name: str = "", server_name: str = "") -> None:
        """Lead to the page of the session that the address names, else to the portal's first page."""
        self.redirect(_portal_page(self, server_name), status=303)

    post = get


class _NoStartButton(BaseHandler):
    """Leads to a session's page at the portal where JupyterHub says that its server does not run.

    JupyterHub's own page offers to start another server there, without a name and with other options. What
    is no page gets its answer: by its status JupyterLab finds out that its server is gone.
    """

    def render_template(self, name: str, sync: bool = False, **values: Any) -> Any:
        """JupyterHub's page of that name, except the one of a server that does not run."""
        if name != "not_running.html" or "text/html" not in self.request.headers.get("Accept", ""):
            return super().render_template(name, sync, **values)
        session = str(values.get("server_name") or self.server_name())
        self.redirect(_portal_page(self, session), status=303)
        raise web.Finish

    def server_name(self) -> str:
        """The name in the requested address, of a server that JupyterHub does not know by it (any more)."""
        return ""


class EndedServer(_NoStartButton, UserUrlHandler):
    """The address of a server."""

    def server_name(self) -> str:
        """The first part of what follows the user's name."""
        return str(self.path_kwargs.get("user_path") or "").strip("/").partition("/")[0]


class EndedStart(_NoStartButton, SpawnPendingHandler):
    """The address that shows the progress of a start: it stays open, or in the history, after the end."""


class SilentServer(ProxyErrorHandler):
    """What the proxy shows in place of a server that does not answer.

    JupyterHub's own words lead to a restart by the hub.
    """

    def render_template(self, name: str, sync: bool = False, **values: Any) -> Any:
        """JupyterHub's page of an error, with a link to the page of the session that was meant."""
        if values.get("status_code") == HTTPStatus.SERVICE_UNAVAILABLE:
            found = _SERVER.search(self.get_argument("url", ""))
            link = f'<a href="{escape(_portal_page(self, found[1] if found else ""))}">'
            values["message_html"] = (
                f"The server of this session does not answer. {link}Its page at the portal</a> says why."
                if found
                else f"Nothing answers at this address now. {link}Go to the portal</a>."
            )
        return super().render_template(name, sync, **values)


def install() -> None:
    """Add our handlers to JupyterHub's."""
    # The first handler that takes an address is used.
    pages.insert(0, (r"/user/(?P<user_name>[^/]+)(?P<user_path>/.*)?", EndedServer))
    pages[:0] = [(r"/spawn-pending/([^/]+)", EndedStart), (r"/spawn-pending/([^/]+)/([^/]+)", EndedStart)]
    starts = (r"/home", r"/spawn", r"/spawn/([^/]+)", r"/spawn/([^/]+)/([^/]+)")
    pages[:0] = [(r"/error/(\d+)", SilentServer), *((address, StartsAtPortal) for address in starts)]
    default_handlers.extend(
        [
            (r"/api/carme/ready", ReadyHandler),
            (r"/api/carme/activity", ActivityHandler),
            (r"/api/carme/extend", ExtendHandler),
            (r"/api/carme/logins/([^/]+)", LoginsHandler),
        ]
    )
