"""How often the start estimates came true."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from carme.sessions.start_estimates import Range, Record, held

JUDGED = 50  # of the latest that count


@dataclass(frozen=True)
class Estimate:
    """The first range that was published for a job's start.

    Attributes:
        correct: Whether the job started within it; None while it waits.
        number: Counts through those that have been judged.
    """

    job_id: int
    forecast: Range
    correct: bool | None = None
    number: int | None = None


class Estimates:
    """The open ranges, and the latest that have been judged.

    Args:
        stored: What was known when the broker ended, in the order in which it was judged.
    """

    def __init__(self, stored: list[Estimate]) -> None:
        self._open = {each.job_id: each for each in stored if each.correct is None}
        self._judged = [each for each in stored if each.correct is not None]
        self._changed: dict[int, Estimate] = {}
        self._dropped: set[int] = set()

    @property
    def record(self) -> Record:
        """How many of the latest held the true start."""
        return Record(sum(bool(each.correct) for each in self._judged), len(self._judged))

    def give(self, job_id: int, forecast: Range) -> None:
        """A range was published for a waiting job; the first one is compared with the true start."""
        if job_id not in self._open:
            self._open[job_id] = self._changed[job_id] = Estimate(job_id, forecast)

    def started(self, job_id: int, start: datetime) -> None:
        """A job started: the range that was published for it is judged."""
        estimate = self._open.pop(job_id, None)
        if estimate is None:
            return
        number = (self._judged[-1].number or 0) + 1 if self._judged else 1
        judged = replace(estimate, correct=held(estimate.forecast, start), number=number)
        self._changed[job_id] = judged
        self._judged.append(judged)
        for old in self._judged[:-JUDGED]:
            self._drop(old.job_id)
        del self._judged[:-JUDGED]

    def discard(self, job_id: int) -> None:
        """A job will never start."""
        if self._open.pop(job_id, None):
            self._drop(job_id)

    def take_changes(self) -> tuple[list[Estimate], list[int]]:
        """What has changed since the last call, and the jobs whose ranges are to be known no more."""
        changes = list(self._changed.values()), list(self._dropped)
        self._changed.clear()
        self._dropped.clear()
        return changes

    def restore_changes(self, changed: Iterable[Estimate], dropped: Iterable[int]) -> None:
        """The changes of the last `take_changes` could not be stored; later ones win."""
        for estimate in changed:
            if estimate.job_id not in self._dropped:
                self._changed.setdefault(estimate.job_id, estimate)
        self._dropped |= {job_id for job_id in dropped if job_id not in self._changed}

    def _drop(self, job_id: int) -> None:
        self._changed.pop(job_id, None)
        self._dropped.add(job_id)
