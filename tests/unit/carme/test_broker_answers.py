"""Long answers of the broker, which are written in pieces."""

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from pydantic_core import to_json

from carme.broker import answers
from carme.broker.overview import JobFigures, Overview
from carme.broker.protocol import EventBatch
from carme.jobs import Job
from carme.translation import message as _

from .conftest import RUNNING


def jobs(count: int) -> list[Job]:
    detail = _("{name} begins {start}", name="carme-1", start="soon")
    found = [
        Job.model_validate({"id": number, "name": "a", "user": "ada", "state": "PENDING"})
        for number in range(count)
    ]
    return [*found[:-1], *(job.model_copy(update={"detail": detail}) for job in found[-1:])]


def results(count: int) -> list[Any]:
    """One of each kind that may be long, and some that are not."""
    figures = [JobFigures.of(job) for job in jobs(count)]
    return [
        jobs(count),
        EventBatch(jobs=jobs(count), cursor="a-1", complete=True),
        Overview(answered=None, failure='a "word"', jobs=figures),
        {"share": float("nan"), "jobs": jobs(count)},
        list(range(count)),
        None,
    ]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 13])
def test_an_answer_in_pieces_says_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "AT_ONCE", 4)
    for result in results(count):
        whole = json.loads(to_json({"result": result, "error": None}, inf_nan_mode="null"))
        assert json.loads(b"".join(answers.pieces(result))) == whole


def test_a_long_answer_is_never_in_memory_as_a_whole() -> None:
    batch = EventBatch(jobs=jobs(20 * answers.AT_ONCE), cursor="a-1", complete=True)
    tracemalloc.start()
    size = sum(map(len, answers.pieces(batch)))
    _current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 3


async def test_while_a_long_answer_is_taken_others_get_theirs(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "AT_ONCE", 1)
    # More than the kernel holds for a socket: the broker has to wait for the reader.
    await site.queue([RUNNING | {"A": number, "j": str(number) * 10_000} for number in range(10, 60)])
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket, limit=1 << 24)
    writer.write(b'{"method": "jobs"}\n')
    start = await reader.readexactly(100)
    assert len(await site.client.jobs()) == 50
    answer = json.loads(start + await reader.readline())
    assert [job["id"] for job in answer["result"]] == list(range(10, 60))
    events = await site.client.events()
    assert [job.id for job in events.jobs] == list(range(10, 60)) and events.complete
    writer.close()
