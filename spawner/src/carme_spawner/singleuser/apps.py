"""The apps of a session: an image's programs and users' web apps, each on a Unix socket behind this server.

An image offers the app NAME by an executable `/opt/carme/apps/NAME`, which gets the path of its socket as its
only argument. It is started when it is first opened.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
from pathlib import Path
from typing import IO, Any

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.routing import PathMatches, Router, Rule

from carme_spawner.singleuser import folders

#: The programs that this image offers.
PROGRAMS = Path("/opt/carme/apps")
#: Apps with a path of their own; all others are at app/NAME/.
NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
AT_TOP = ("vscode", "tensorboard")
#: Seconds until an app must listen.
START_SECONDS = 60.0
STOP_SECONDS = 3.0
#: Lines of its log that are shown when an app fails.
LAST_LINES = 20


class AppFailed(Exception):
    """An app cannot be reached: what happened, what to do, and the last lines that it wrote."""

    def __init__(self, what: str, remedy: str, lines: str = "") -> None:
        super().__init__(f"{what} {remedy}")
        self.what = what
        self.remedy = remedy
        self.lines = lines


def listens(path: Path) -> bool:
    """Whether something accepts connections at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


class Programs:
    """The image's apps that run."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._starting: dict[str, asyncio.Lock] = {}

    async def socket_of(self, name: str) -> Path:
        """Where an app listens; starts it if the image has it and it does not run. Raises AppFailed."""
        path = folders.private("apps") / f"{name}.sock"
        if listens(path):
            return path
        program = PROGRAMS / name
        if not os.access(program, os.X_OK):
            raise AppFailed(
                f"This image has no app called {name}, and nothing listens at {path}.",
                f"Start a program that listens there, or a session with an image that has {name}.",
            )
        async with self._starting.setdefault(name, asyncio.Lock()):
            if not listens(path):
                await self._start(name, program, path)
        return path

    async def _start(self, name: str, program: Path, path: Path) -> None:
        log = path.with_suffix(".log")
        with clean(path, log) as output:
            process = await asyncio.create_subprocess_exec(
                str(program),
                str(path),
                cwd=Path.home(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[name] = process
        for _ in range(int(START_SECONDS / 0.05)):
            if listens(path):
                return
            if process.returncode is not None:
                raise AppFailed(
                    f"The app {name} ended while it started, with exit code {process.returncode}.",
                    "See its last lines below, correct what they name, and load this page again.",
                    last_lines(log),
                )
            await asyncio.sleep(0.05)
        await self._end(process)
        raise AppFailed(
            f"The app {name} did not listen within {START_SECONDS:.0f} seconds and was ended.",
            "See its last lines below, and load this page again.",
            last_lines(log),
        )

    async def stop(self) -> None:
        """End all that were started."""
        await asyncio.gather(*(self._end(process) for process in self._running.values()))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await process.wait()


def clean(path: Path, log: Path) -> IO[bytes]:
    """Remove what an earlier run of an app left; the new log, which only we can read."""
    path.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    log.touch(mode=0o600)
    return log.open("wb")


def last_lines(log: Path) -> str:
    """The end of an app's log."""
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    return ""


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
