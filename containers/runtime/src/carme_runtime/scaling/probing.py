"""What probes of all frameworks have in common: when there is enough to measure, and how it ends."""

import statistics
from collections.abc import Callable
from pathlib import Path

from carme_runtime.scaling.ending import end, failure_sentence
from carme_runtime.scaling.profiles import Profile
from carme_runtime.scaling.sampling import FEWEST, LEAST, LONGEST, MOST, WATCHING, Step, finish, links_of


class Probe:
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

    def shortage(self) -> str:
        """What is missing for a result; empty: nothing was seen that could have one."""
        raise NotImplementedError

    def _is_enough(self, seconds: float, batch: int) -> bool:
        """Whether to measure now, so many seconds after the first step, with a batch of this size."""
        count = len(self._watched)
        if count >= FEWEST and seconds >= LONGEST:
            return True
        if count and batch != statistics.mode(step.batch for step in self._watched):
            return False  # such as the last one of an epoch
        return count >= MOST or (count >= LEAST and seconds >= WATCHING * self._seconds)

    def _conclude(self, measure: Callable[[], Profile]) -> None:
        """Measure, write the result, and end the script, also where that fails."""
        self.over = True
        try:
            finish(measure(), self._file)
        except Exception as error:  # whatever it is, the script has nothing to do with it
            end(failure_sentence(error))
