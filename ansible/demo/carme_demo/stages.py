"""What is printed while the demo works: one line per stage, with its time."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_WIDTH = 58


class Stages:
    """Prints stages and adds up their times.

    Args:
        stream: where to print; a terminal also shows the stage that is going on.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self.current = "starting"

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Print ``title`` with its time when the block has ended; a failed block is marked."""
        self.current = title
        self.show(title)
        start = time.monotonic()
        try:
            yield
        except BaseException:
            self.line(f"{title} failed", time.monotonic() - start)
            raise
        self.line(title, time.monotonic() - start)

    def show(self, text: str) -> None:
        """On a terminal: say what is going on, to be overwritten."""
        if self._live:
            self._stream.write(f"\r\033[K  {text[:100]} ...")
            self._stream.flush()

    def line(self, title: str, seconds: float | None = None) -> None:
        """Print one finished line."""
        clear = "\r\033[K" if self._live else ""
        taken = "" if seconds is None else f"{'.' * max(2, _WIDTH - len(title))} {seconds:6.1f} s"
        self._stream.write(f"{clear}  {title} {taken}".rstrip() + "\n")
        self._stream.flush()

    def total(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._start
