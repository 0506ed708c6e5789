"""From the browser to an app's Unix socket, by way of jupyter-server-proxy."""

from html import escape
from typing import Any

from jupyter_server_proxy.handlers import LocalProxyHandler
from tornado import web

from carme_spawner.singleuser.apps import AppFailed, Programs

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>App not available</title>
<style>body {{ font-family: sans-serif; max-width: 50rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ background: #f3f3f3; color: #222; padding: 1rem; overflow: auto }}</style></head>
<body><main><h1>App not available</h1><p>{what}</p><p>{remedy}</p>{lines}</main></body></html>
"""


class AppProxy(LocalProxyHandler):
    """One app; the address's parts are its name and what it sees as path."""

    def __init__(self, *arguments: Any, programs: Programs, prefix: str, **options: Any) -> None:
        self.programs = programs
        super().__init__(*arguments, **options)
        self.proxy_base = prefix

    async def proxy(self, port: str, proxied_path: str) -> Any:
        """A request. What the base class calls port is the app's name; on a Unix socket none is needed."""
        if not proxied_path:
            query = f"?{self.request.query}" if self.request.query else ""
            return self.redirect(f"{self.request.path}/{query}")
        try:
            self.unix_socket = str(await self.programs.socket_of(port))
        except AppFailed as error:
            return self.explain(error)
        return await super().proxy(80, proxied_path)

    async def open(self, port: str, proxied_path: str) -> Any:
        """A WebSocket."""
        try:
            self.unix_socket = str(await self.programs.socket_of(port))
        except AppFailed as error:
            raise web.HTTPError(502, str(error)) from None
        return await super().open(80, proxied_path)

    def explain(self, error: AppFailed) -> None:
        """Say what failed, in a page."""
        self.set_status(502)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        lines = f"<pre>{escape(error.lines)}</pre>" if error.lines else ""
        self.finish(PAGE.format(what=escape(error.what), remedy=escape(error.remedy), lines=lines))
