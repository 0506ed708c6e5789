"""The programs that a job starts on this node: how they are found, waited for and ended."""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import FrameType

from carme.launch.exits import Exit, LaunchError

STOP_SECONDS = 25  # between passing SIGTERM on and SIGKILL; less than Slurm's KillWait, so that we clean up
POLL_SECONDS = 0.02  # between two checks of something that cannot be waited for
#: What Python ignores, and a program that it starts should not.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Programs:
    """What was started here. SIGTERM, SIGINT and SIGHUP are passed on; who does not heed them is killed.

    An ended program stays a zombie until it is waited for, so its number never belongs to somebody else.
    """

    def __init__(self) -> None:
        self._running: list[int] = []
        self._codes: dict[int, int] = {}
        self.stopping = False  # by a signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGALRM, lambda number, frame: self._send(signal.SIGKILL))

    def start(self, arguments: list[str], environment: Mapping[str, str]) -> int:
        """Start a program in the current folder; its number. Raises LaunchError."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        try:
            program = spawn(arguments, environment)
            self._running.append(program)
        except OSError as error:
            raise LaunchError(
                Exit.NO_COMMAND,
                f"{arguments[0]!r} cannot be run on {socket.gethostname()}: {error.strerror}.",
                "Check the command's name and that it is executable, or tell an administrator.",
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        return program

    def wait(self, program: int) -> int:
        """Wait for its end; its exit code, in a shell's manner 128 more than the signal that killed it."""
        if program not in self._codes:
            self._reap(program, 0)
        return self._codes[program]

    def wait_for_any(self, seconds: float) -> None:
        """Wait until one of those that run has ended, or the time is over."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # from now on none is missed
        if not os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            signal.sigtimedwait({signal.SIGCHLD}, seconds)

    def has_ended(self, program: int, within: float = 0.0) -> bool:
        """Whether it is over, or will be in so many seconds."""
        end = time.monotonic() + within
        while program not in self._codes:
            self._reap(program, os.WNOHANG)
            if program in self._codes or time.monotonic() >= end:
                break
            time.sleep(POLL_SECONDS)
        return program in self._codes

    def end(self, program: int) -> None:
        """See that it is over: SIGTERM, and SIGKILL for programs that ignore it."""
        if not self.has_ended(program):
            os.kill(program, signal.SIGTERM)
            if not self.has_ended(program, STOP_SECONDS):
                os.kill(program, signal.SIGKILL)
                self.wait(program)

    def _reap(self, program: int, how: int) -> None:
        if os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT | how):
            self._running.remove(program)
            code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            self._codes[program] = code if code >= 0 else 128 - code

    def _send(self, number: int) -> None:
        for program in self._running:
            os.kill(program, number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._running and not self._codes:
            raise SystemExit(128 + number)  # nothing has been started yet
        self.stopping = True
        self._send(number)
        signal.alarm(STOP_SECONDS)


def spawn(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Start a program that is found by the PATH of its own environment; its number. Raises OSError."""
    missing: OSError = FileNotFoundError(2, os.strerror(2), arguments[0])
    for place in places(arguments[0], environment):
        try:
            return os.posix_spawn(place, arguments, environment, setsigmask=[], setsigdef=IGNORED_BY_PYTHON)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            missing = error
    raise missing


def places(program: str, environment: Mapping[str, str]) -> list[str]:
    """Where a program may lie."""
    if "/" in program:
        return [program]
    return [os.path.join(folder, program) for folder in os.get_exec_path(environment)]


def without_export(environment: Mapping[str, str]) -> dict[str, str]:
    """Our `--export=NONE` must not hold for the steps that the job starts."""
    return {name: value for name, value in environment.items() if name != "SLURM_EXPORT_ENV"}


def log(sentence: str) -> None:
    print(f"carme-job: {sentence}", file=sys.stderr, flush=True)
