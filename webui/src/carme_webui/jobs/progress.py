"""How far the tasks of an array are, in numbers and in words."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from carme.jobs import JobState

__all__ = ["CANCELLED", "COMPLETED", "FAILED", "RUNNING", "WAITING", "Progress"]

WAITING, RUNNING, FAILED = "waiting", "running", "failed"
COMPLETED, CANCELLED = JobState.COMPLETED.value, JobState.CANCELLED.value


@dataclass
class Progress:
    """How far the tasks of an array are.

    Attributes:
        counts: How many wait, run, completed, failed and were cancelled.
        started, ended: When the first task began, and the last one ended.
        waits: Why the next ones wait.
    """

    counts: Counter[str] = field(default_factory=Counter)
    started: datetime | None = None
    ended: datetime | None = None
    waits: str = ""

    @property
    def is_over(self) -> bool:
        """Whether no task waits or runs."""
        return not self.counts[WAITING] and not self.counts[RUNNING]

    @property
    def failed(self) -> int:
        """How many tasks failed."""
        return self.counts[FAILED]

    @property
    def state(self) -> JobState:
        """The state of the whole: it waits or runs as long as a task does, then the worst end counts."""
        for kind, state in (
            (RUNNING, JobState.RUNNING),
            (WAITING, JobState.PENDING),
            (FAILED, JobState.FAILED),
            (CANCELLED, JobState.CANCELLED),
        ):
            if self.counts[kind]:
                return state
        return JobState.COMPLETED

    @property
    def sentence(self) -> str:
        """What came of the tasks, or how far they are."""
        number = self.counts.total()
        if not self.is_over:
            return self.words
        if self.failed:
            reported = ngettext("%(n)d of %(all)d task failed.", "%(n)d of %(all)d tasks failed.", number)
            return reported % {"n": self.failed, "all": number}
        if count := self.counts[CANCELLED]:
            reported = ngettext(
                "%(n)d of %(all)d task was cancelled.", "%(n)d of %(all)d tasks were cancelled.", number
            )
            return reported % {"n": count, "all": number}
        reported = ngettext("%d task ended without an error.", "%d tasks ended without an error.", number)
        return reported % number

    @property
    def words(self) -> str:
        """How many tasks there are, and how many in each state."""
        number = self.counts.total()
        reported = {
            RUNNING: _("%d running"),
            WAITING: _("%d waiting"),
            COMPLETED: _("%d completed"),
            FAILED: _("%d failed"),
            CANCELLED: _("%d cancelled"),
        }
        parts = ", ".join(words % self.counts[kind] for kind, words in reported.items() if self.counts[kind])
        return ngettext("%d task", "%d tasks", number) % number + f": {parts}"
