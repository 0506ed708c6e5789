"""Finding jobs in years of history; the list's page and the API search in the same way."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _

from carme.jobs import JobState, Phase
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job

__all__ = ["FILTERS", "KINDS", "MOST_ACTIVE", "Search", "active_jobs", "own_jobs"]

KINDS = {"batch": _("Batch jobs"), "session": _("Sessions"), "other": _("Others")}

FILTERS = {
    "": (_("All"), list(JobState)),
    "pending": (_("Waiting"), [state for state in JobState if state.phase is Phase.PENDING]),
    "running": (
        _("Running"),
        [
            state
            for state in JobState
            if state.phase in (Phase.RUNNING, Phase.ENDING) and state is not JobState.UNKNOWN
        ],
    ),
    "completed": (_("Completed"), [JobState.COMPLETED]),
    "cancelled": (_("Cancelled"), [JobState.CANCELLED]),
    "failed": (
        _("Failed"),
        [
            state
            for state in JobState
            if state is JobState.UNKNOWN
            or (state.phase is Phase.OVER and state not in (JobState.COMPLETED, JobState.CANCELLED))
        ],
    ),
}
#: Jobs that the dashboard shows; all are on a page of their own.
MOST_ACTIVE = 8
# At most as many digits as every database can hold.
_DIGITS = 18


def own_jobs(user: User) -> "QuerySet[Job]":
    """The jobs that this user may see."""
    return Job.objects.filter(user=user.username)


def active_jobs(user: User) -> list[Job]:
    """Those of my jobs that wait or run and serve no session; an array is one of them.

    Returns:
        The newest MOST_ACTIVE, newest first, and one more if there are more.
    """
    own = own_jobs(user)
    heads = own.filter(active=True).exclude(kind="session").annotate(head=Coalesce("array_id", "id"))
    # Few are found first: years of a user's jobs are not gone through for them.
    newest = heads.order_by("-head").values("head").distinct()[: MOST_ACTIVE + 1]
    return list(own.filter(id__in=newest))


@dataclass(frozen=True)
class Search:
    """What is looked for; what is empty or None does not matter.

    Attributes:
        text: Part of the name, or the number.
        states: Any of these states of Slurm.
        since, until: Submitted in this time.
        array: The number of an array whose tasks are meant.
    """

    text: str = ""
    states: Iterable[str] = ()
    kind: str = ""
    partition: str = ""
    since: datetime | None = None
    until: datetime | None = None
    array: int | None = None

    def apply(self, jobs: "QuerySet[Job]") -> "QuerySet[Job]":
        """Those of `jobs` that are looked for."""
        if self.text:
            match = Q(name__icontains=self.text)
            if self.text.isascii() and self.text.isdigit() and len(self.text) <= _DIGITS:
                match |= Q(id=int(self.text))
            jobs = jobs.filter(match)
        exact: dict[str, Any] = {"kind": self.kind, "partition": self.partition}
        exact |= {"submitted__gte": self.since, "submitted__lt": self.until}
        exact |= {"array_id": self.array}
        if states := list(self.states):
            exact["state__in"] = states
        return jobs.filter(**{name: value for name, value in exact.items() if value})
