"""How often the expected starts that were told came true."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from carme.sessions.outlook import Range, Record, held

JUDGED = 50  # of the latest that count


@dataclass(frozen=True)
class Estimate:
    """The first range that was told for a job's start.

    Attributes:
        kept: Whether the job started within it; None while it waits.
        number: Counts through those that have been judged.
    """

    job_id: int
    told: Range
    kept: bool | None = None
    number: int | None = None


class Estimates:
    """The open ranges, and the latest that have been judged.

    Args:
        stored: What was known when the broker ended, in the order in which it was judged.
    """

    def __init__(self, stored: list[Estimate]) -> None:
        self._open = {one.job_id: one for one in stored if one.kept is None}
        self._judged = [one for one in stored if one.kept is not None]
        self._changed: dict[int, Estimate] = {}
        self._dropped: set[int] = set()

    @property
    def record(self) -> Record:
        """How many of the latest held the true start."""
        return Record(sum(bool(one.kept) for one in self._judged), len(self._judged))

    def give(self, job_id: int, told: Range) -> None:
        """A range was told for a job that waits; the first one is held against the truth."""
        if job_id not in self._open:
            self._open[job_id] = self._changed[job_id] = Estimate(job_id, told)

    def started(self, job_id: int, start: datetime) -> None:
        """A job started: the range that was told for it is judged."""
        estimate = self._open.pop(job_id, None)
        if estimate is None:
            return
        number = (self._judged[-1].number or 0) + 1 if self._judged else 1
        judged = replace(estimate, kept=held(estimate.told, start), number=number)
        self._changed[job_id] = judged
        self._judged.append(judged)
        for old in self._judged[:-JUDGED]:
            self._drop(old.job_id)
        del self._judged[:-JUDGED]

    def gone(self, job_id: int) -> None:
        """A job will never start."""
        if self._open.pop(job_id, None):
            self._drop(job_id)

    def take(self) -> tuple[list[Estimate], list[int]]:
        """What has changed since the last call, and the jobs whose ranges are to be known no more."""
        changes = list(self._changed.values()), list(self._dropped)
        self._changed.clear()
        self._dropped.clear()
        return changes

    def take_back(self, changed: Iterable[Estimate], dropped: Iterable[int]) -> None:
        """What the last `take` told could not be kept; what has changed since holds."""
        for estimate in changed:
            if estimate.job_id not in self._dropped:
                self._changed.setdefault(estimate.job_id, estimate)
        self._dropped |= {job_id for job_id in dropped if job_id not in self._changed}

    def _drop(self, job_id: int) -> None:
        self._changed.pop(job_id, None)
        self._dropped.add(job_id)
