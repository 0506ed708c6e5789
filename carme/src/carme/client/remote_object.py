"""What the client's objects share: what is known of them, and waiting for a change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from pydantic import BaseModel

from carme.client.connection import Connection

__all__ = ["RemoteObject", "wait_until"]

Model = TypeVar("Model", bound=BaseModel)


class RemoteObject(Generic[Model]):
    """Something of the portal's, as it was when the portal last answered.

    Args:
        connection: To the portal.
        known: What is known of it.
    """

    def __init__(self, connection: Connection, known: Model) -> None:
        self._connection, self._known = connection, known

    def _is(self, found: object) -> Model:
        """Take an answer of the portal's about it."""
        self._known = type(self._known).model_validate(found)
        return self._known


def wait_until(
    done: Callable[[], bool],
    late: Callable[[], str],
    timeout: float | None,
    first: float = 1.0,
    longest: float = 10.0,
) -> None:
    """Call `done`, at longer and longer intervals, until it is true.

    Args:
        done: Whether it has come; requests what is known from the portal.
        late: The error's text.
        timeout: Seconds; None: no limit.
        first, longest: Seconds between two calls.

    Raises:
        TimeoutError: It is not true after `timeout` seconds.
    """
    end, pause = time.monotonic() + (timeout or 0), first
    while not done():
        if timeout is not None and time.monotonic() + pause > end:
            raise TimeoutError(late())
        time.sleep(pause)
        pause = min(longest, pause * 1.2)
