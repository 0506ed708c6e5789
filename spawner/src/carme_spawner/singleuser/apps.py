"""The apps of a session: an image's programs and users' web apps, each on a Unix socket behind this server.

An image offers the app NAME by an executable `/opt/carme/apps/NAME`, which gets the path of its socket as its
only argument. It is started when it is first opened.
"""

import re
import secrets
from typing import Any

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.routing import PathMatches, Router, Rule

from carme_spawner.singleuser import folders
from carme_spawner.singleuser.programs import AT_TOP, Programs

NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"


class TerminalHandler(JupyterHandler):
    """`carme/terminal`: a page with nothing but a fresh shell."""

    @web.authenticated
    def get(self) -> None:
        # A workspace of its own, so that no other page's tabs are restored; our panel opens the shell in it.
        workspace = f"terminal-{secrets.token_hex(3)}"
        self.redirect(url_path_join(self.base_url, "doc/workspaces", workspace) + "?carme-open=terminal")


class _Apps(Router):
    """Leads to the proxy, which is imported when the first app is opened."""

    def __init__(self, server: ServerApp, programs: Programs, pattern: str) -> None:
        self._application = server.web_app
        self._programs = programs
        self._pattern = re.compile(pattern)

    def find_handler(self, request: HTTPServerRequest, **arguments: Any) -> HTTPMessageDelegate | None:
        from carme_spawner.singleuser.app_proxy import AppProxy

        found = self._pattern.fullmatch(request.path)
        assert found is not None
        name = found["top"] or found["name"]
        prefix = name if found["top"] else f"app/{name}"
        return self._application.get_handler_delegate(
            request,
            AppProxy,
            {"programs": self._programs, "prefix": prefix},
            path_args=[name.encode(), (found["rest"] or "").encode()],
        )


def install(server: ServerApp) -> Programs:
    """Add the apps' addresses to the server, and make the folder where users' own web apps listen."""
    folders.private("apps")
    programs = Programs()
    base = re.escape(server.base_url)
    pattern = rf"{base}(?:(?P<top>{'|'.join(AT_TOP)})|app/(?P<name>{NAME}))(?P<rest>/.*)?"
    router = server.web_app.default_router
    router.rules.insert(
        0, router.process_rule(Rule(PathMatches(pattern + "$"), _Apps(server, programs, pattern)))
    )
    server.web_app.add_handlers(".*$", [(url_path_join(server.base_url, "carme/terminal"), TerminalHandler)])
    return programs
