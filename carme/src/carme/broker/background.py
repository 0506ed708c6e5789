"""What the broker does beside answering requests, round after round."""

import logging
from collections.abc import Awaitable

__all__ = ["Rounds"]

_log = logging.getLogger("carme.broker")


class Rounds:
    """Rounds of a background task: after one that fails the next one must still come.

    An error that a task knows is its own matter. Every other one is logged here, with where it was raised,
    but only once while it stays the same: rounds may follow each other in seconds.

    Args:
        task: What it does, as the log names it.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._error = ""

    async def attempt(self, work: Awaitable[object]) -> None:
        """Do one round."""
        try:
            await work
            self._error = ""
        except Exception as error:
            if repr(error) != self._error:
                _log.exception("%s has failed, and goes on.", self._task)
            self._error = repr(error)
