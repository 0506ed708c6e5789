"""What pages show of arrays: how far all of their tasks are, and the tasks one by one."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from django.core.paginator import Page, Paginator
from django.db.models import Count, Max, Min
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.errors import InvalidRequest
from carme.jobs import JobState, Phase, arrays
from carme_webui.jobs.models import Job
from carme_webui.jobs.progress import CANCELLED, COMPLETED, FAILED, RUNNING, WAITING, Progress

__all__ = [
    "FAILURES",
    "MOST_CELLS",
    "PER_PAGE",
    "Cell",
    "add_progress",
    "cells",
    "failed_tasks",
    "progress_of",
    "resubmit_failed",
    "states_of",
    "tasks_of",
]

PER_PAGE = 100
#: A grid of more tasks is no help.
MOST_CELLS = 1000

#: The states of tasks that failed.
FAILURES = [
    state for state in JobState if state.phase is Phase.OVER and state.value not in (COMPLETED, CANCELLED)
]


def add_progress(found: Iterable[Job]) -> None:
    """Give each row that stands for an array its `progress`, with two questions for all of them."""
    shown = {row.id: row for row in found if row.is_array}
    if not shown:
        return
    reported = {number: Progress() for number in shown}
    rows = Job.objects.filter(array_id__in=shown).order_by()
    for each in rows.filter(task=None).values("array_id", "state", "tasks", "explanation"):
        progress, kind = reported[each["array_id"]], _kind(each["state"])
        progress.counts[kind] += _count(each["tasks"])
        if kind == WAITING:
            progress.waits = each["explanation"]
    groups = rows.exclude(task=None).values("array_id", "state")
    for group in groups.annotate(number=Count("id"), first=Min("started"), last=Max("ended")):
        progress = reported[group["array_id"]]
        progress.counts[_kind(group["state"])] += group["number"]
        progress.started = min(filter(None, (progress.started, group["first"])), default=None)
        progress.ended = max(filter(None, (progress.ended, group["last"])), default=None)
    for number, row in shown.items():
        row.progress = reported[number]


def _count(tasks: str) -> int:
    try:
        return arrays.count(tasks)
    except ValueError:
        return 1


def _kind(state: str) -> str:
    known = JobState(state)
    if known.phase is Phase.OVER:
        return known.value if known.value in (COMPLETED, CANCELLED) else FAILED
    return WAITING if known.phase is Phase.PENDING else RUNNING


@dataclass(frozen=True)
class Cell:
    """A task in the grid of an array's tasks."""

    task: int
    kind: str
    label: str
    url: str = ""


def cells(array: Job) -> list[Cell]:
    """All tasks with their states, in their order; none if they are too many for a grid."""
    labels = {
        WAITING: _("Waiting"),
        RUNNING: _("Running"),
        COMPLETED: _("Completed"),
        FAILED: _("Failed"),
        CANCELLED: _("Cancelled"),
    }
    if array.progress is None or array.progress.counts.total() > MOST_CELLS:
        return []
    found: dict[int, Cell] = {}
    rows = Job.objects.filter(user=array.user, array_id=array.array_id).order_by("-task")
    for row in rows.only("id", "array_id", "task", "tasks", "state"):
        kind = _kind(row.state)
        if row.task is not None:
            found[row.task] = Cell(row.task, kind, labels[kind], row.task_url)
            continue
        with suppress(ValueError):
            for number in arrays.numbers(row.tasks):
                found.setdefault(number, Cell(number, kind, labels[kind]))
    return [found[number] for number in sorted(found)]


def failed_tasks(array: Job) -> list[Job]:
    """The tasks of an array that failed, in their order."""
    rows = Job.objects.filter(user=array.user, array_id=array.array_id, state__in=FAILURES)
    return list(rows.exclude(task=None).order_by("task"))


def progress_of(array: Job) -> Progress:
    """How far all tasks of an array are."""
    add_progress([array])
    return array.progress or Progress()


def states_of(array: Job) -> dict[JobState, str]:
    """Which tasks are in each of Slurm's states, as expressions like `0-3,5`."""
    found: defaultdict[JobState, list[int]] = defaultdict(list)
    rows = Job.objects.filter(user=array.user, array_id=array.array_id).order_by()
    for state, task, waiting in rows.values_list("state", "task", "tasks"):
        found[JobState(state)] += [task] if task is not None else _waiting(waiting)
    return {state: arrays.listed(numbers) for state, numbers in found.items() if numbers}


def _waiting(tasks: str) -> list[int]:
    try:
        return list(arrays.numbers(tasks))
    except ValueError:
        return []  # Slurm shortens long lists, which then say less


def resubmit_failed(array: Job, broker: BrokerClient) -> int:
    """Submit those tasks of an array once more that failed; the new job's number.

    Raises:
        InvalidRequest: None failed.
        CarmeError: The broker or Slurm refuses.
    """
    tasks = arrays.listed(row.task for row in failed_tasks(array) if row.task is not None)
    if not tasks:
        raise InvalidRequest(_("No task of this array failed."), _("Submit the whole array again instead."))
    return broker.resubmit(array.id, user=array.user, tasks=tasks)


def tasks_of(array: Job, page: str | None) -> "Page[Job]":
    """A page of an array's tasks, in their order; those that wait come last, together."""
    rows = Job.objects.filter(user=array.user, array_id=array.array_id).order_by("task", "id")
    waiting = list(rows.filter(task=None)[:PER_PAGE])
    rows = rows.exclude(task=None)
    found = Paginator(rows, PER_PAGE).get_page(page)
    if not found.has_next():
        found.object_list = [*found.object_list, *waiting]
    return found
