"""Bandwidth and operations that all workers of a run share."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Pace"]


class Pace:
    """At most so many units a second, over all processes that were forked with it.

    Args:
        context: The multiprocessing context of those processes.
        rate: Units a second; 0: no limit.
    """

    def __init__(self, context: Any, rate: int) -> None:
        self.rate = rate
        # When the next unit may go. CLOCK_MONOTONIC is the same for all processes of a host.
        self._next = context.Value("d", 0.0) if rate else None

    def take(self, units: int) -> None:
        """Wait until these units may go."""
        if self._next is None or not units:
            return
        with self._next.get_lock():
            now = time.monotonic()
            begin = max(now, self._next.value)
            self._next.value = begin + units / self.rate
        if begin > now:
            time.sleep(begin - now)
