"""`./dev`: all services of a sandbox, from their start to their end."""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from carme.errors import CarmeError, ConfigError
from carme.sandbox.accounts import accounts_in
from carme.sandbox.processes import SANDBOX, end_marked
from carme.sandbox.redis import redis_command
from carme.sandbox.sample_jobs import write_sample_jobs
from carme.sandbox.site import Addresses, Places, make_site

__all__ = ["main"]

#: Who there is; the last one administers the site.
USERS = ("ada", "ben", "grace")
PORT = 8600
#: Services that end by themselves.
PASSING = ("seed",)
NEEDED_BY_OTHERS = ("redis", "broker")
#: Seconds that services get to end.
END_SECONDS = 10.0


class Services:
    """The processes of a sandbox. Each line that they write is shown behind the service's name.

    Args:
        places: The sandbox's folder.
        source: The folders that Python imports the parts from.
    """

    def __init__(self, places: Places, source: Sequence[str]) -> None:
        programs = [str(places.programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self._environment = os.environ | {
            "CARME_CONFIG": str(places.configuration),
            "DJANGO_SETTINGS_MODULE": "carme_webui.development",
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": os.pathsep.join(source),
            "PYTHONUNBUFFERED": "1",
            SANDBOX: str(places.folder),
        }
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = places.folder
        self._stopping = False
        #: Fails when one has ended that was not to.
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(
        self,
        name: str,
        *arguments: str,
        stdin: str | None = None,
        marks: dict[str, asyncio.Event] | None = None,
    ) -> None:
        """Start a program; in a session of its own, so that Ctrl-C reaches us alone.

        Args:
            name: What it is called in front of its lines.
            arguments: The program and its arguments.
            stdin: What it reads.
            marks: Lines that are not shown: they set an event.
        """
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            cwd=self._folder,
            start_new_session=True,
        )
        if stdin is not None:
            assert process.stdin
            process.stdin.write(stdin.encode())
            process.stdin.close()
        self._running[name] = process
        self._tasks.append(asyncio.create_task(self._show(name, marks or {})))
        self._tasks.append(asyncio.create_task(self._watch(name)))

    async def _show(self, name: str, marks: dict[str, asyncio.Event]) -> None:
        stream = self._running[name].stdout
        assert stream
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            if text in marks:
                marks[text].set()
            else:
                print(f"{name:>7} | {text}", flush=True)

    async def _watch(self, name: str) -> None:
        """Say when a service has ended that was not to."""
        code = await self._running[name].wait()
        if not (self._stopping or self.over.done() or (name in PASSING and not code)):
            self.over.set_exception(
                CarmeError(f"The service {name} ended with exit code {code}.", "See the lines above.")
            )

    async def stop(self) -> None:
        """End all of them, and whatever they have started."""
        self._stopping = True
        # What others ask comes last: those would complain.
        last = [name for name in self._running if name in NEEDED_BY_OTHERS]
        for names in ([name for name in self._running if name not in last], last):
            for name in names:
                with contextlib.suppress(ProcessLookupError):
                    self._running[name].terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await asyncio.gather(*(self._running[name].wait() for name in names))
        await asyncio.to_thread(end_marked, SANDBOX, str(self._folder))
        await asyncio.gather(*(process.wait() for process in self._running.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Sandbox:
    """A site on this computer: what it is made of, and its services.

    Args:
        folder: Where everything lies.
        port: Where browsers go.
        sessions: Whether to run JupyterHub.
        reload: Whether the portal starts anew when its code changes.
    """

    def __init__(self, folder: Path, port: int, *, sessions: bool = True, reload: bool = True) -> None:
        self.redis = redis_command(Places(folder).redis)
        self.missing = _missing_for_sessions() if sessions else "none, because of --no-sessions."
        self._reload = reload
        self.addresses = Addresses(
            front=_free(port),
            # With JupyterHub there is a proxy in front of both.
            portal=port if self.missing else _free(),
            hub=_free(),
            proxy_api=_free(),
            redis=self.redis is not None,
        )
        self.places = make_site(folder, self.addresses, list(USERS))
        write_sample_jobs(self.places.slurm, accounts_in(self.places.homes))
        self.passwords = {name: secrets.token_urlsafe(9) for name in USERS}
        self._source = [path for path in sys.path if path.endswith("/src")]
        _write_programs(self.places, self._source)
        self.services = Services(self.places, self._source)

    @property
    def url(self) -> str:
        """What browsers open."""
        return f"http://127.0.0.1:{self.addresses.front}"

    async def start(self) -> None:
        """Start everything; returns when users can sign in. Raises CarmeError."""
        python, services = sys.executable, self.services
        if self.redis:
            await services.start("redis", *self.redis)
        await services.start("broker", python, "-m", "carme.sandbox", str(self.places.folder))
        users = asyncio.Event()
        await services.start(
            "seed",
            *_django("seed_sandbox"),
            stdin=json.dumps(
                [{"name": n, "password": p, "admin": n == USERS[-1]} for n, p in self.passwords.items()]
            ),
            marks={"users": users, "all": asyncio.Event()},
        )
        if not self.missing:
            await services.start("hub", python, "-m", "carme_spawner.sandbox")
        await users.wait()
        await services.start("portal", *self._portal())
        await services.start("sync", *_django("sync"))
        await _answers(f"{self.url}/accounts/login/")
        for name in ("worker", "beat"):
            await services.start(name, *_celery(name))

    def _portal(self) -> list[str]:
        folders = [word for path in self._source for word in ("--reload-dir", path)]
        return [
            *[sys.executable, "-m", "uvicorn", "carme_webui.asgi:application", "--host", "127.0.0.1"],
            *[
                "--port",
                str(self.addresses.portal),
                "--log-level",
                "warning",
                "--timeout-graceful-shutdown",
                "1",
            ],
            *(["--reload", *folders] if self._reload else []),
        ]

    def describe(self, seconds: float) -> str:
        """What to do now."""
        width = max(map(len, USERS))
        lines = [
            f"Carme's portal is ready after {seconds:.1f} s: {self.url}",
            "",
            "Log in as",
            *(
                f"  {name:{width}}  {password}{'  (administrator)' if name == USERS[-1] else ''}"
                for name, password in self.passwords.items()
            ),
            "",
            f"Sessions: {self.missing or 'they start the JupyterLab of this Python.'}",
        ]
        if not self.redis:
            lines.append(
                "Redis: there is no redis-server. Background work is passed on in a folder, and open pages "
                "look for changes every few seconds."
            )
        return "\n".join([*lines, f"Files: {self.places.folder}", "Stop with Ctrl-C.", ""])


def _django(name: str) -> list[str]:
    """A command of the portal's; it loads no pages to check them, which takes longer than all else of it."""
    return [sys.executable, "-m", "django", name, "--skip-checks"]


async def run(sandbox: Sandbox, since: float) -> int:
    """Start a sandbox, and wait for Ctrl-C or for the end of one of its services; the exit code.

    Args:
        since: When the start began, in seconds since 1970.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    over = sandbox.services.over
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(sandbox.start())
    try:
        await asyncio.wait({stopping, starting, over}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            print(f"\n{sandbox.describe(time.time() - since)}", flush=True)
            await asyncio.wait({stopping, over}, return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            over.result()
        return 0
    finally:
        starting.cancel()
        stopping.cancel()
        print("Stopping ...", flush=True)
        await sandbox.services.stop()


def _missing_for_sessions() -> str:
    """Why no sessions can be started here, as a sentence; empty: they can."""
    for package in ("jupyterhub", "batchspawner", "jupyterlab"):
        if importlib.util.find_spec(package) is None:
            return f"none can be started, because {package} is not installed."
    return ""


def _celery(name: str) -> list[str]:
    common = [sys.executable, "-m", "celery", "--quiet", "--app", "carme_webui.celery"]
    common += [name, "--loglevel", "WARNING"]
    return [*common, "--schedule", "portal/celerybeat-schedule"] if name == "beat" else common


def _free(port: int = 0) -> int:
    """A port on the loopback where nothing listens. Raises ConfigError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"The portal cannot listen on port {port}: {error.strerror}.",
                "Choose another one with --port.",
            ) from None
        return probe.getsockname()[1]


async def _answers(url: str) -> None:
    """Wait until a page is there."""
    while not await asyncio.to_thread(_is_answering, url):  # noqa: ASYNC110  another process says nothing
        await asyncio.sleep(0.1)


def _is_answering(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _write_programs(places: Places, source: Sequence[str]) -> None:
    """What jobs start by its name, and login files by which they find it and our own Python.

    Nothing of Carme is installed beside that Python: it imports the parts from where they are written.
    """
    python = [f"PYTHONPATH={os.pathsep.join(source)}", sys.executable, "-s"]
    run = "from carme.cli import program; program()"
    command = [f"CARME_CONFIG={places.configuration}", *python, "-c", run]
    server = [*python, "-m", "carme_spawner.singleuser", "--allow-root"]
    for name, words in (("carme", command), ("carme-singleuser", server)):
        file = places.programs / name
        file.write_text(f'#!/bin/sh\nexec env {shlex.join(words)} "$@"\n')
        file.chmod(0o755)
    folders = shlex.quote(os.pathsep.join([str(places.programs), str(Path(sys.executable).parent)]))
    for home in places.homes.iterdir():
        for name in (".profile", ".zprofile"):
            (home / name).write_text(f'PATH={folders}:"$PATH"\n')


def command_parser() -> argparse.ArgumentParser:
    """The command line of `./dev`."""
    parser = argparse.ArgumentParser(
        prog="./dev",
        description="Carme on this computer, for developers: portal, broker and sessions over a cluster of "
        "pretended nodes, whose jobs are processes of yours. It needs no root. Who reaches the port and "
        "has a password can run programs as you, so it listens on the loopback only.",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"where browsers go (default: {PORT})")
    parser.add_argument(
        "--folder", type=Path, help="keep everything there, for the next start (default: nothing is kept)"
    )
    parser.add_argument("--no-sessions", action="store_true", help="without JupyterHub, which starts faster")
    parser.add_argument(
        "--no-reload", action="store_true", help="do not restart the portal when its code changes"
    )
    parser.add_argument("--since", type=float, default=time.time(), help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sandbox with its portal; the exit code."""
    options = command_parser().parse_args(arguments)
    try:
        with _folder(options.folder) as folder:
            return asyncio.run(_up(folder, options))
    except CarmeError as error:
        print(f"dev: {error}", file=sys.stderr)
        return 1


async def _up(folder: Path, options: argparse.Namespace) -> int:
    sandbox = Sandbox(folder, options.port, sessions=not options.no_sessions, reload=not options.no_reload)
    return await run(sandbox, options.since)


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    """The folder of the sandbox; one of its own goes at the end. Paths of sockets must be short."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="carme-dev-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
