"""The one program that an agent starts at once, before it has imported what others are started with."""

import os
import signal
from collections.abc import Mapping
from types import FrameType

#: What Python ignores, and a program that it starts should not.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Child:
    """A program to which SIGTERM and SIGINT of this process are passed on, from its first moment.

    It stays a zombie until it is waited for, so its number never belongs to somebody else.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        self.pid = 0
        self._signals: list[int] = []
        self._code: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        self.pid = _spawn(command, environment)
        for number in self._signals:
            self.send(number)

    def send(self, number: int) -> None:
        """Send it a signal; nothing if it is over."""
        if self._code is None:
            os.kill(self.pid, number)

    def has_ended(self) -> bool:
        """Whether `wait` returns at once."""
        return bool(
            self._code is not None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        )

    def wait(self) -> int:
        """Its exit code, in a shell's manner 128 more than the signal that killed it."""
        if self._code is None:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._code = code if code >= 0 else 128 - code
        return self._code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.pid:
            self.send(number)
        else:
            self._signals.append(number)


def _spawn(command: list[str], environment: Mapping[str, str]) -> int:
    """Start a program that is found by the PATH of its own environment; the error is that of the last try."""
    program = command[0]
    if "/" in program:
        places = [program]
    else:
        places = [os.path.join(folder, program) for folder in os.get_exec_path(environment)]  # noqa: PTH118
    missing: OSError = FileNotFoundError(2, os.strerror(2), program)
    for place in places:
        try:
            return os.posix_spawn(place, command, environment, setsigdef=IGNORED_BY_PYTHON)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            missing = error
    raise missing
