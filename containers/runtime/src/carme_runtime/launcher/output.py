"""What the user sees: the ranks' lines with their numbers, live and never mixed within a line."""

import contextlib
import errno
import os
import queue
import re
import select
import threading
from collections.abc import Callable

LONGEST_LINE = 2**16  # characters; a longer line is shown in pieces, so that it need not be kept whole
TAIL = 2**14  # characters of each rank's error output that are kept for the report
REPORTED_LINES = 40
TRACEBACK = "Traceback (most recent call last)"  # how Python's reports of errors begin

# A carriage return alone ends a line too: progress bars redraw themselves with it. One at the very
# end may be the first half of "\r\n".
_LINE_END = re.compile(r"\r?\n|\r(?!$|\n)")

# What torch.distributed puts in front of each line of a traceback that nobody catches.
_TORCH_LABEL = re.compile(r"\A\[rank\d+\]: ?")


class Lines:
    """Cuts one rank's stream into lines and puts the rank in front of each."""

    def __init__(self, rank: int, colour: bool) -> None:
        label = f"[rank {rank}] "
        self._label = f"\033[2m{label}\033[0m" if colour else label
        self._rest = ""

    def feed(self, text: str) -> str:
        """The lines that are complete with `text`."""
        self._rest += text
        out: list[str] = []
        start = 0
        ended = "\n" in text or "\r" in self._rest  # far quicker to see than to search for
        for match in _LINE_END.finditer(self._rest) if ended else ():
            line, end = self._rest[start : match.start()], "\r" if match[0] == "\r" else "\n"
            start = match.end()
            if line or end == "\n":
                out.append(f"{self._label}{line}{end}")
        self._rest = self._rest[start:]
        while len(self._rest) > LONGEST_LINE:
            out.append(f"{self._label}{self._rest[:LONGEST_LINE]}\n")
            self._rest = self._rest[LONGEST_LINE:]
        return "".join(out)

    def finish(self) -> str:
        """What is left, as a line."""
        rest, self._rest = self._rest.rstrip("\r"), ""
        return f"{self._label}{rest}\n" if rest else ""


class Tail:
    """The last lines of a rank's error output."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> None:
        self._text = (self._text + text)[-TAIL:]

    def has_traceback(self) -> bool:
        """Whether there is one, which may begin before the lines of the report."""
        return TRACEBACK in self._text

    def report(self) -> str:
        """From the traceback on, if there is one, else the last lines."""
        lines = [line.split("\r")[-1] for line in self._text.rstrip().replace("\r\n", "\n").split("\n")]
        lines = [_TORCH_LABEL.sub("", line) for line in lines[-REPORTED_LINES:]]
        for index, line in enumerate(lines):
            if line.startswith(TRACEBACK):
                lines = lines[index:]
                break
        return "\n".join(lines).strip("\n")


_Item = tuple[int, str, Callable[[], None] | None]  # file descriptor, text, what to call afterwards


class Printer:
    """Writes to standard output and error in a thread, so that a slow reader holds up nothing else.

    Args:
        broken: called once, in the thread, when nobody reads standard output any more.
    """

    def __init__(self, broken: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._broken = broken
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, stream: int, text: str, done: Callable[[], None] | None = None) -> None:
        """Print `text` on file descriptor `stream`, then call `done` in the thread."""
        self._queue.put((stream, text, done))

    def close(self) -> None:
        """Wait until all is printed."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        lost: set[int] = set()
        while (item := self._queue.get()) is not None:
            stream, text, done = item
            if text and stream not in lost:
                try:
                    _write(stream, text.encode("utf-8", "replace"))
                except OSError as error:
                    lost.add(stream)
                    if stream == 1:
                        if error.errno != errno.EPIPE:  # who reads no more (`| head`) knows
                            sentence = f"carme-run: The output cannot be written: {error.strerror}.\n"
                            with contextlib.suppress(OSError):
                                _write(2, sentence.encode())
                        self._broken()
            if done:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it
                    done()


def _write(stream: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream, view) :]
        except BlockingIOError:
            select.select([], [stream], [])
