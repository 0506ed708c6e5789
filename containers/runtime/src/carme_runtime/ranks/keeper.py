"""Ends the ranks of an agent that died without a chance to end them itself.

Runs as a process beside the agent and reads process groups from its standard input: `+GROUP` when
one starts, `-GROUP` when it is over. The end of the input means that the agent is gone.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Keeper:
    """The agent's side. The process is started for the first group: most sessions never have one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """See that there is a process: before a group starts, or it may outlive an agent that dies then."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )

    def watch(self, group: int) -> None:
        """Kill `group`, which has just been started, should this process die."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """`group` is over. Must be said before its number can be used again."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the keeper."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process and self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # somebody killed the keeper: the run itself can go on
            self._process.stdin.write(line.encode())


def main() -> None:
    """Watch until the input ends, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line)
        if group > 0:
            groups.add(group)
        else:
            groups.discard(-group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
