"""The programs of an image's apps: they run until the session ends, each on a Unix socket."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import IO

from carme.translation import joined, message
from carme_spawner.singleuser import folders

#: The programs that this image offers.
PROGRAMS = Path("/opt/carme/apps")
#: Apps with an address of their own; all others are at app/NAME/.
AT_TOP = ("vscode", "tensorboard")
#: Seconds until an app must listen.
START_SECONDS = 60.0
STOP_SECONDS = 3.0
#: Lines of its log that are shown when an app fails.
LAST_LINES = 20


class AppFailed(Exception):
    """An app cannot be reached: what happened, what to do, and the last lines that it wrote."""

    def __init__(self, what: str, remedy: str, lines: str = "") -> None:
        super().__init__(joined([what, remedy]))
        self.what = what
        self.remedy = remedy
        self.lines = lines


def listens(path: Path) -> bool:
    """Whether something listens at a Unix socket, though it accept no connections just now. Never waits."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # as many wait as it lets wait
        except OSError:
            return False
    return True


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
                message(
                    "This image has no app called {name}, and nothing listens at {path}.",
                    name=name,
                    path=path,
                ),
                message(
                    "Start a program that listens there, or a session with an image that has {name}.",
                    name=name,
                ),
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
                    message(
                        "The app {name} ended while it started, with exit code {code}.",
                        name=name,
                        code=process.returncode,
                    ),
                    message("See its last lines below, correct what they name, and load this page again."),
                    last_lines(log),
                )
            await asyncio.sleep(0.05)
        await self._end(process)
        raise AppFailed(
            message(
                "The app {name} did not listen within {seconds} seconds and was ended.",
                name=name,
                seconds=int(START_SECONDS),
            ),
            message("See its last lines below, and load this page again."),
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
