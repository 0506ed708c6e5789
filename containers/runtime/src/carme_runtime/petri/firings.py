"""Firings in a recording: each has a row of the worker that did it, and ends when its task did."""

import time
from typing import TYPE_CHECKING

from carme_runtime import profile

if TYPE_CHECKING:
    from carme_runtime.petri.pool import Connection

#: By how much two nodes' clocks may drift apart in a second.
_DRIFT = 1e-4
#: A report that seems to have taken so many seconds longer than others comes from a clock that began anew.
_RESTART = 120.0


class Firings:
    """Records the firings of a run, where this process records.

    Workers of this node read the clock that this process reads. That of another node differs by an unknown
    offset: of all its reports the one counts that took the least time from the task's end to here, so the
    error is about the time that a message takes. Where a node has started again, its clock has, too: then
    what was known of it no longer counts.
    """

    def __init__(self) -> None:
        self._offsets: dict[int, tuple[float, float]] = {}
        self._until: dict[tuple[int | None, int], float] = {}

    def add(
        self,
        connection: "Connection",
        host: str,
        name: str,
        times: tuple[float, float],
        number: int,
    ) -> None:
        """A firing of a worker is over.

        Args:
            connection: To the worker.
            host: The worker's node.
            name: Of the transition.
            times: Its begin and end in seconds, by the clock of that node.
            number: 1 + the micro-batch of a token that it gave; 0: none is known.
        """
        if profile.recorder is None:
            return
        node, worker = connection.node, (connection.node, connection.slot)
        end = times[1] if node is None else self._own_clock(node, times[1])
        begin = max(end - (times[1] - times[0]), self._until.get(worker, 0.0))
        self._until[worker] = end = max(begin, end)
        profile.recorder.add(
            profile.FIRING,
            name,
            begin,
            end=end,
            extra=number,
            row=f"worker {connection.slot} on {host}",
        )

    def _own_clock(self, node: int, ended: float) -> float:
        """A time of another node's clock by this one's."""
        now = time.perf_counter()
        offset, since = self._offsets.get(node, (now - ended, now))
        allowed = offset + _DRIFT * (now - since)
        offset = now - ended if now - ended > allowed + _RESTART else min(allowed, now - ended)
        self._offsets[node] = (offset, now)
        return ended + offset
