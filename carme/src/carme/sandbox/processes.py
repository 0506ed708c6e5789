"""What a job runs: `carme-job` and all that it starts, as processes of this computer (Linux)."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from carme.launch.job import ITSELF
from carme.slurm.account import UnixAccount

__all__ = ["KILL_WAIT", "SANDBOX", "JobProcess", "end_marked"]

#: Seconds between SIGTERM and SIGKILL, as Slurm's KillWait.
KILL_WAIT = 30.0
#: The variables that mark all processes of a sandbox, and all of a job.
SANDBOX, JOB = "CARME_SANDBOX", "CARME_SANDBOX_JOB"


class JobProcess:
    """The processes of one job on this computer.

    Args:
        folder: The job's private folder, where its launcher begins.
        log: The file that its output is appended to.
        environment: What Slurm would set.
        owner: Whose home and name it has, and as whom it runs where the system knows that account.
        submission: Which submission of the job it is.
    """

    def __init__(
        self, folder: Path, log: Path, environment: Mapping[str, str], owner: UnixAccount, submission: int = 1
    ) -> None:
        self._folder = folder
        self._owner = owner
        self._log = log
        self._mark = f"{folder}:{environment.get('SLURM_JOB_ID', '')}"
        self._environment = {**owner.environment(), **environment, JOB: self._mark}
        if sandbox := os.environ.get(SANDBOX):
            self._environment[SANDBOX] = sandbox
        self._arguments = [
            *ITSELF,
            *(["--submission", str(submission)] if submission > 1 else []),
            str(folder),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._killing: asyncio.TimerHandle | None = None
        self._end_wanted: float | None = None

    async def run(self) -> tuple[int, int]:
        """Run the job to its end; exit code and signal; one of them is 0. Raises OSError."""
        private = Path(f"/tmp/carme-{self._environment.get('SLURM_JOB_ID')}")
        was_there = await asyncio.to_thread(private.exists)
        with _appending(self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
                **self._owner.identity(),
            )
        if self._end_wanted is not None:
            self.end(self._end_wanted)
        try:
            code = await self._process.wait()
        finally:
            if self._killing:
                self._killing.cancel()
            # As Slurm does: what a job has left running ends with it.
            await asyncio.to_thread(end_marked, JOB, self._mark)
            if not was_there:
                # A node's own /tmp ends with the job.
                await asyncio.to_thread(shutil.rmtree, private, ignore_errors=True)
        return (code, 0) if code >= 0 else (0, -code)

    def end(self, kill_wait: float = KILL_WAIT) -> None:
        """Ask it to end; who does not heed that is killed after so many seconds."""
        if self._process is None:
            self._end_wanted = kill_wait  # it is just being started
            return
        if self._process.returncode is not None or self._killing:
            return
        self._signal(signal.SIGTERM)
        self._killing = asyncio.get_running_loop().call_later(kill_wait, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _appending(file: Path) -> BinaryIO:
    return file.open("ab")


def end_marked(variable: str, value: str) -> int:
    """Kill all processes that began with a variable in their environment, but this one; how many there were.

    What a job starts inherits its environment, also in a session of its own.
    """
    mark, found = f"{variable}={value}".encode(), set[int]()
    while now := [number for number in _marked(mark) if number != os.getpid()]:
        if not set(now) - found:
            break  # they are being taken away
        for number in now:
            found.add(number)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
    return len(found)


def _marked(mark: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue  # another user's, or it has just ended
        if mark in environment.split(b"\0"):
            found.append(int(folder.name))
    return found
