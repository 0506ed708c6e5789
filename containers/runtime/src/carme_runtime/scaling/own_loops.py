"""Loops in which a script of Keras on TensorFlow trains by itself, where the probe sees no steps."""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_CHECKS = 12  # at the optimizer in the time after which a loop counts as one
_MOVING = 3  # looks that find further steps: a single one, as before `fit`, is no loop


class OwnLoop:
    """Notices such a loop by what its optimizers count.

    A compiled loop calls an optimizer when it is traced, and none of ours after that.

    Args:
        seconds: For how long a loop trains before it counts as one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls = 0
        self._optimizer: Any = None
        self._known: tuple[int, int] | None = None
        self._moved = 0

    @property
    def is_seen(self) -> bool:
        """Whether an optimizer has made a step outside of Keras' own loops."""
        return self._calls > 0

    def note(self, optimizer: Any) -> None:
        """An optimizer makes a step, or is traced."""
        self._calls += 1
        self._optimizer = weakref.ref(optimizer)

    def goes_on(self, seconds: float) -> bool:
        """Look at the last optimizer. True: there is a loop, and it still trains.

        Args:
            seconds: Since the first step.
        """
        optimizer = self._optimizer and self._optimizer()
        seen = (self._calls, _iterations(optimizer))
        moves = self._known is not None and seen != self._known
        self._known, self._moved = seen, self._moved + moves
        return moves and self._moved >= _MOVING and seconds >= self._seconds

    def follow(self, is_wanted: Callable[[], bool], found: Callable[[], object]) -> None:
        """Look now and then, in a thread of its own.

        Args:
            is_wanted: Whether to go on.
            found: Is called where there is a loop.
        """

        def check() -> None:
            began, pause = time.monotonic(), threading.Event()
            while is_wanted():
                if self.goes_on(time.monotonic() - began):
                    found()
                    return
                pause.wait(self._seconds / _CHECKS)

        threading.Thread(target=check, daemon=True).start()


def _iterations(optimizer: Any) -> int:
    """The steps that an optimizer has counted; 0 where that cannot be read."""
    try:
        return int(optimizer.iterations.numpy())
    except Exception:  # it may be of any kind, and be changed by the script at this moment
        return 0
