"""What was put into a queue of GPI-2 and not waited for yet."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence


class Progress:
    """Whether a number still changes."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._since = 0.0

    def is_over(self, number: int, seconds: float) -> bool:
        """Whether it has been this number for so long."""
        if number != self._number:
            self._number, self._since = number, time.monotonic()
        return time.monotonic() - self._since >= seconds


class Posted:
    """The ranks of one queue's operations, as GPI-2's errors do not say whose they are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._last: dict[int, float] = {}  # by rank the number of its last operation
        # Lost ranks that were reported: the queue may have more errors of them than one.
        self._failing: set[int] = set()
        self._found: int | None = None

    @contextlib.contextmanager
    def posting(self, rank: int) -> Iterator[None]:
        """While an operation of this rank is put into the queue, which one thread at a time does."""
        with self._lock:
            self._last[rank] = math.inf
        try:
            yield
        finally:
            with self._lock:
                self._count += 1
                self._last[rank] = self._count

    def now(self) -> tuple[int, frozenset[int]]:
        """What `over` takes after a wait that begins now."""
        with self._lock:
            return self._count, frozenset(self._failing)

    def over(self, before: tuple[int, frozenset[int]]) -> None:
        """All that was there when the wait began is done, and no more errors of it come."""
        count, failing = before
        with self._lock:
            self._last = {rank: number for rank, number in self._last.items() if number > count}
            self._failing -= failing

    def take_lost(self, states: Sequence[int]) -> int | None:
        """A lost rank that was not reported yet, as it is reported now; `states` by rank."""
        with self._lock:
            lost = min((rank for rank in self._last if states[rank]), default=None)
            if lost is not None:
                del self._last[lost]
                self._failing.add(lost)
            return lost

    def failing(self) -> int | None:
        """A lost rank that was reported, and that may be the one whose error comes or whose end does not."""
        with self._lock:
            return min(self._failing, default=None)

    def keep_error(self, code: int) -> None:
        """An error that was found while room was made, for who waits for the queue."""
        with self._lock:
            self._found = code

    def take_error(self) -> int | None:
        """What `keep_error` has kept."""
        with self._lock:
            found, self._found = self._found, None
            return found
