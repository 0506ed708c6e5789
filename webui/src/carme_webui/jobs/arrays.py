"""What pages show of arrays: how far all of their tasks are, and the tasks one by one."""

from collections import Counter
from collections.abc import Iterable

from django.core.paginator import Page, Paginator
from django.db.models import Count
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from carme.jobs import JobState, Phase, arrays
from carme_webui.jobs.models import Job

__all__ = ["PER_PAGE", "tasks_of", "tell_summaries"]

PER_PAGE = 100


def tell_summaries(found: Iterable[Job]) -> None:
    """Give each row that stands for an array its `summary`, with two questions for all of them."""
    shown = {row.id: row for row in found if row.is_array}
    if not shown:
        return
    counts: dict[int, Counter[str]] = {number: Counter() for number in shown}
    rows = Job.objects.filter(array_id__in=shown).order_by()
    for one in rows.filter(task=None).values("array_id", "state", "tasks"):
        counts[one["array_id"]][_kind(one["state"])] += _count(one["tasks"])
    for one in rows.exclude(task=None).values("array_id", "state").annotate(number=Count("id")):
        counts[one["array_id"]][_kind(one["state"])] += one["number"]
    for number, row in shown.items():
        row.summary = _words(counts[number])


def _count(tasks: str) -> int:
    try:
        return arrays.count(tasks)
    except ValueError:
        return 1


def _kind(state: str) -> str:
    known = JobState(state)
    if known.phase is Phase.OVER:
        return known.value if known in (JobState.COMPLETED, JobState.CANCELLED) else "failed"
    return "waiting" if known.phase is Phase.PENDING else "running"


def _words(counts: "Counter[str]") -> str:
    number = counts.total()
    told = {
        "running": _("%d running"),
        "waiting": _("%d waiting"),
        JobState.COMPLETED.value: _("%d completed"),
        "failed": _("%d failed"),
        JobState.CANCELLED.value: _("%d cancelled"),
    }
    parts = ", ".join(words % counts[kind] for kind, words in told.items() if counts[kind])
    return ngettext("%d task", "%d tasks", number) % number + f": {parts}"


def tasks_of(array: Job, page: str | None) -> "Page[Job]":
    """A page of an array's tasks, in their order; those that wait come last, together."""
    rows = Job.objects.filter(user=array.user, array_id=array.array_id).order_by("task", "id")
    waiting = list(rows.filter(task=None)[:PER_PAGE])
    rows = rows.exclude(task=None)
    found = Paginator(rows, PER_PAGE).get_page(page)
    if not found.has_next():
        found.object_list = [*found.object_list, *waiting]
    return found
