"""What servers and the portal call at the hub besides JupyterHub's own API."""

import re
from typing import Any

from jupyterhub.apihandlers import default_handlers
from jupyterhub.handlers import default_handlers as pages
from jupyterhub.handlers.base import UserUrlHandler
from tornado import web

from carme_spawner.activity import ActivityHandler, ExtendHandler
from carme_spawner.logins import LoginsHandler
from carme_spawner.ready import ReadyHandler

__all__ = ["EndedServer", "install"]

#: A session's name, as the portal makes it.
_SESSION = re.compile(r"/(s[0-9a-z]{8})(?:/|\Z)")


class EndedServer(UserUrlHandler):
    """Leads from the address of a server that does not run to its session's page at the portal.

    JupyterHub's own page offers to start another server there, without a name and with other options. What
    is no page gets its answer: by its status JupyterLab finds out that its server is gone.
    """

    def render_template(self, name: str, sync: bool = False, **values: Any) -> Any:
        """JupyterHub's page of that name, except the one of a server that does not run."""
        if name != "not_running.html" or "text/html" not in self.request.headers.get("Accept", ""):
            return super().render_template(name, sync, **values)
        found = _SESSION.match(self.path_kwargs.get("user_path") or "")
        portal = str(self.app.default_url)
        self.redirect(f"{portal}sessions/{found.group(1)}/" if found else portal, status=303)
        raise web.Finish


def install() -> None:
    """Add our handlers to JupyterHub's."""
    # The first handler that takes an address is used.
    pages.insert(0, (r"/user/(?P<user_name>[^/]+)(?P<user_path>/.*)?", EndedServer))
    default_handlers.extend(
        [
            (r"/api/carme/ready", ReadyHandler),
            (r"/api/carme/activity", ActivityHandler),
            (r"/api/carme/extend", ExtendHandler),
            (r"/api/carme/logins/([^/]+)", LoginsHandler),
        ]
    )
