"""Stops a rank between its turns, where threads of its library never rest: they would take cores from others.

The rank stops itself. A small process beside it, `python -m carme_runtime.compare.resting`, waits for the
next order on the rank's connection, and lets it go on. It ends with the rank.
"""

import os
import select
import signal
import subprocess
import sys

_STOPS, _GOES_ON = b"s", b"g"
_AGAIN_SECONDS = 0.01  # after which a rank that had not stopped yet gets that signal again


class Rest:
    """The rests of this process.

    Args:
        connection: Descriptor of the one on which orders come.
    """

    def __init__(self, connection: int) -> None:
        notes, self._notes = os.pipe()
        command = [sys.executable, "-m", "carme_runtime.compare.resting"]
        numbers = map(str, (os.getpid(), notes, connection))
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._watcher = subprocess.Popen([*command, *numbers], pass_fds=(notes, connection), **quiet)
        os.close(notes)

    def until_order(self) -> None:
        """Stop all threads of this process until an order can be read, or the other end is gone."""
        os.write(self._notes, _STOPS)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.write(self._notes, _GOES_ON)


def main() -> None:
    """Let the process that the first argument names go on when it is to, until it ends."""
    # They go to all of the rank's group: who is to end is the rank, which can only once it goes on.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    rank, notes, connection = map(int, sys.argv[1:])
    while os.read(notes, 1) == _STOPS:
        ready, _, _ = select.select([connection, notes], [], [])
        if notes in ready:  # it did not stop, as somebody else lets it go on, or has ended
            if os.read(notes, 1) != _GOES_ON:
                return
            continue
        while True:
            os.kill(rank, signal.SIGCONT)
            if select.select([notes], [], [], _AGAIN_SECONDS)[0]:
                break
        if os.read(notes, 1) != _GOES_ON:
            return


if __name__ == "__main__":
    main()
