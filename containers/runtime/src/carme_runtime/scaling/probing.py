"""What probes of all frameworks have in common: when there is enough to measure, and how it ends."""

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carme_runtime.scaling.ending import end, failure_sentence
from carme_runtime.scaling.profiles import Profile
from carme_runtime.scaling.sampling import (
    FEWEST,
    LEAST,
    LONGEST,
    MOST,
    WARM,
    WATCHING,
    Step,
    finish,
    links_of,
    usual_size,
)


class Probe(ABC):
    """Of one process.

    Args:
        file: Where the result is written.
        network: The links' description, if one was given.
        seconds: About how long to measure.

    Raises:
        CarmeRuntimeError: The links cannot be read, before anything is measured.
    """

    def __init__(self, file: Path, network: str | None, seconds: float) -> None:
        self._file, self._links, self._seconds = file, links_of(network), seconds
        self.steps = 0
        self.over = False
        self._began = 0.0  # when the first step ended
        self._watched: list[Step] = []  # those that count
        self._followed: Callable[[], Any] | None = None
        self._foreign_steps = Counter[int]()  # steps of others since its last one, by identity

    @abstractmethod
    def shortage(self) -> str:
        """What is missing for a result; empty: nothing was seen that could have one."""

    def _follows(self, trained: Any) -> bool:
        """Whether steps of this optimizer, or model, count.

        Those of the first one do, unless it has stopped, or is gone, and another goes on: scripts may begin
        with steps of something else.
        """
        known = self._followed() if self._followed else None
        if known is not trained:
            if known is not None:
                self._foreign_steps[id(trained)] += 1
                if self._foreign_steps[id(trained)] < WARM + LEAST:
                    return False
            if self._followed is not None:
                self.steps, self._began = 0, 0.0
                self._watched.clear()
            self._followed = reference(trained)
        self._foreign_steps.clear()
        return True

    def _is_enough(self, seconds: float, sizes: list[int]) -> bool:
        """Whether to measure now, so many seconds after the first step.

        Args:
            seconds: Since then.
            sizes: Of the batches of steps that count; the last one would be measured.
        """
        count = len(self._watched)
        if count >= FEWEST and seconds >= LONGEST:
            return True
        if count and sizes[-1] != usual_size(sizes):
            return False  # such as the last one of an epoch
        return count >= MOST or (count >= LEAST and seconds >= WATCHING * self._seconds)

    def _conclude(self, measure: Callable[[], Profile]) -> None:
        """Measure, write the result, and end the script, also where that fails."""
        self.over = True
        try:
            finish(measure(), self._file)
        except Exception as error:  # whatever it is, the script has nothing to do with it
            end(failure_sentence(error))


def reference(value: Any) -> Callable[[], Any]:
    """Of something that the script may drop."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
