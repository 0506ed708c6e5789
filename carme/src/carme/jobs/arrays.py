"""Arrays of jobs: tasks that differ in nothing but their number, submitted together.

Which tasks there are is written as Slurm writes it: `0-99%4` are a hundred, at most four of them at a time;
`1,5,10-20:2` are single ones and every second of a range.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from carme.translation import message as _

__all__ = [
    *["MAXIMUM_TASK", "Tasks", "count", "expression", "fields", "includes", "limited", "listed"],
    *["numbers", "read_name", "task_name"],
]

MAXIMUM_TASK = 4_000_000  # Slurm's own bound; the site's (MaxArraySize) is mostly lower
_PARTS = 1000  # ranges in one expression
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", re.ASCII)
_LIMIT = re.compile(r"[1-9]\d{0,6}", re.ASCII)


def _ranges(text: str) -> list[range]:
    """The ranges in an expression. Raises ValueError where it is none."""
    parts = text.partition("%")[0].split(",")
    found = []
    for part in parts:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(_("must be numbers of tasks, like 0-9, 1,3,5 or 0-99%4 (four at a time)"))
        first, last = int(match[1]), int(match[2] or match[1])
        step = int(match[3] or 1)
        if last < first or step < 1 or last > MAXIMUM_TASK:
            raise ValueError(
                _(
                    "has a range {part!r}; ranges go up, from 0 to {most}, in steps of 1 or more",
                    part=part,
                    most=MAXIMUM_TASK,
                )
            )
        found.append(range(first, last + 1, step))
    return found


def _check(text: str) -> str:
    text = text.replace(" ", "")
    _first, percent, limit = text.partition("%")
    ranges = _ranges(text)
    if len(ranges) > _PARTS:
        raise ValueError(_("must have at most {most} ranges", most=_PARTS))
    if percent and not _LIMIT.fullmatch(limit):
        raise ValueError(_("must say after '%' how many tasks may run at a time, at least 1"))
    return text


#: The tasks of an array, in a request.
Tasks = Annotated[str, Field(max_length=8192), AfterValidator(_check)]


def numbers(tasks: str) -> Iterator[int]:
    """The numbers of the tasks, in order, each once."""
    ranges = _ranges(tasks)
    if len(ranges) == 1:
        yield from ranges[0]
        return
    yield from sorted({number for each in ranges for number in each})


def count(tasks: str) -> int:
    """How many tasks there are."""
    return sum(1 for _ in numbers(tasks))


def includes(tasks: str, number: int) -> bool:
    """Whether a task is among them; Slurm's words that are no such expression have none."""
    try:
        return any(number in each for each in _ranges(tasks))
    except ValueError:
        return False


def expression(items: int, at_once: int | None = None) -> str:
    """The tasks 0 to `items` - 1, at most `at_once` of them at a time."""
    return ("0" if items == 1 else f"0-{items - 1}") + (f"%{at_once}" if at_once is not None else "")


def listed(tasks: Iterable[int]) -> str:
    """The expression for these tasks; those that follow each other are one range."""
    ranges: list[list[int]] = []
    for task in sorted(set(tasks)):
        if ranges and task == ranges[-1][1] + 1:
            ranges[-1][1] = task
        else:
            ranges.append([task, task])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def limited(tasks: str, whole: str) -> str:
    """The expression `tasks` with the limit of tasks at a time that the array `whole` has."""
    _, percent, limit = whole.partition("%")
    return tasks.partition("%")[0] + percent + limit


def fields(array_id: int, tasks: str) -> dict[str, Any]:
    """The fields of a `Job` that say what it is of an array: one task, or some that wait."""
    single = tasks.partition("%")[0]
    which = {"task": int(single)} if single.isdecimal() else {"tasks": tasks}
    return {"array_id": array_id, **which}


def read_name(text: str) -> tuple[int, int | None]:
    """The number in `123`, or those of array and task in `123_4`.

    Raises:
        ValueError: It is neither.
    """
    match = re.fullmatch(r"(\d{1,18})(?:_(\d{1,7}))?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a job; write its number, or 123_4 for task 4 of array 123")
    return int(match[1]), int(match[2]) if match[2] else None


def task_name(array_id: int, task: int | str) -> str:
    """A task, or several that wait, as Slurm's programs and Carme's call them: `123_4`, `123_[5-9]`."""
    return f"{array_id}_{task}" if str(task).isdecimal() else f"{array_id}_[{task}]"
