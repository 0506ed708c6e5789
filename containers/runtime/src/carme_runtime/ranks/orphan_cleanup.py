"""Ends the ranks of an agent that died without a chance to end them itself.

Runs as a process beside the agent and reads process groups from its standard input: `?ENTRY` when one is
about to start whose leader has this entry in its environment, `+GROUP` when it has, `-GROUP` when it is over.
The end of the input means that the agent is gone.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

#: Seconds within which a process that was being started is there, and between two looks for it.
STARTED, POLL = 2.0, 0.02


class OrphanCleanup:
    """The agent's side. The process is started for the first group: most sessions never have one.

    Where memory runs out and one rank's end was not enough, Linux ends this process, and not the session's
    server: it is the smallest of those that rank with the ranks. The next group gets a new one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def begin(self) -> None:
        """See that there is a process: before a group starts, or it may outlive an agent that dies then."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
        # The process itself runs this file alone, without any package.
        from carme_runtime import oom_score

        with oom_score.children_at(oom_score.RANK):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        for group in self._groups:
            self._send(f"+{group}\n")

    def expect(self, entry: str) -> None:
        """A group is about to start whose leader's environment has the entry `NAME=VALUE`; empty: none is."""
        self._send(f"?{entry}\n")

    def watch(self, group: int) -> None:
        """Kill `group`, which has just been started, should this process die."""
        self._groups.add(group)
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """`group` is over. Must be called before its number can be used again."""
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def close(self) -> None:
        """End the process that cleans up."""
        if self._process is not None:
            assert self._process.stdin
            self.expect("")
            self._process.stdin.close()
            self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process and self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # somebody killed the cleanup: the run itself can go on
            self._process.stdin.write(line.encode())


def main() -> None:
    """Watch until the input ends, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    expected = ""
    for line in sys.stdin:
        if line.startswith("?"):
            expected = line[1:].rstrip("\n")
            continue
        group = int(line)
        if group > 0:
            groups.add(group)
            expected = ""
        else:
            groups.discard(-group)
    _kill(groups)
    until = time.monotonic() + STARTED
    while expected and time.monotonic() < until:
        # The agent died while it started one, and could not report that.
        _kill(_leaders(os.fsencode(expected)) - groups)
        time.sleep(POLL)


def _kill(groups: set[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _leaders(entry: bytes) -> set[int]:
    """The leaders of process groups of this user that have an entry in their environment."""
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is not for this process to see
            pid = int(folder.name)
            if os.getpgid(pid) != pid or folder.stat().st_uid != os.getuid():
                continue
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


if __name__ == "__main__":
    main()
