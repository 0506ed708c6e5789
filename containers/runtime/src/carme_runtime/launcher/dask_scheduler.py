"""Dask's scheduler: `python -m carme_runtime.launcher.dask_scheduler HOST PORT`.

Dask's own command answers HTTP on a port, to every user of the node and without a password. This one shows
its pages on the Unix socket that a variable names, and nowhere where there is none.
"""

import asyncio
import os
import signal
import socket
import sys
from typing import Any

from carme_runtime.launcher.dask import PAGES


def bound(path: str) -> socket.socket | None:
    """The socket of the pages; None where it cannot be made: a run goes on without them."""
    from tornado.netutil import bind_unix_socket  # pyright: ignore[reportMissingImports]

    try:
        return bind_unix_socket(path, mode=0o600)
    except (OSError, ValueError) as error:  # the latter of tornado, where there is something else
        print(f"Dask's pages are not shown, as {path} cannot be made: {error}", file=sys.stderr, flush=True)
        return None


async def serve(host: str, port: int) -> None:
    """Be the scheduler until a signal ends it."""
    from distributed import Scheduler  # pyright: ignore[reportMissingImports]
    from distributed.http.routing import RoutingApplication  # pyright: ignore[reportMissingImports]
    from tornado.httpserver import HTTPServer  # pyright: ignore[reportMissingImports]

    path = os.environ.pop(PAGES, "")
    pages = bound(path) if path else None

    class OnSocket(Scheduler):
        def start_http_server(self, routes: Any, *_: Any, **__: Any) -> None:
            self.http_application = RoutingApplication(routes)
            self.http_server = HTTPServer(self.http_application)
            if pages:
                self.http_server.add_socket(pages)
            # `client.dashboard_link` reads both.
            self.http_server.port = 0
            self.services["dashboard"] = self.http_server

    scheduler = OnSocket(host=host, port=port, protocol="tls", dashboard=bool(pages))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with scheduler:
        print(f"Scheduler at: {scheduler.address}", file=sys.stderr, flush=True)
        ends = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(scheduler.finished())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
