"""Long answers of the broker, which are written in pieces."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from pydantic_core import to_json

from carme.broker import answers, server
from carme.broker.overview import JobFigures, Overview
from carme.broker.peers import Peer
from carme.broker.protocol import EventBatch
from carme.config import Settings
from carme.jobs import Job
from carme.slurm import UnixAccount
from carme.translation import message as _
from patience import HANG

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


def held(connection: socket.socket) -> Iterator[bytes]:
    """What has arrived at a connection that does not block."""
    while True:
        try:
            yield connection.recv(1 << 16)
        except BlockingIOError:
            return


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
    loop, has_begun = asyncio.get_running_loop(), asyncio.Event()
    async with asyncio.timeout(HANG):
        # Not a stream of asyncio: its buffer takes the whole answer, read or not.
        with socket.socket(socket.AF_UNIX) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(str(site.settings.broker.socket))
            slow.setblocking(False)
            await loop.sock_sendall(slow, b'{"method": "jobs"}\n')
            loop.add_reader(slow, has_begun.set)
            await has_begun.wait()
            loop.remove_reader(slow)
            assert len(await site.client.jobs()) == 50
            # The broker is in this loop: what comes now is what the kernel has held.
            line = b"".join(held(slow))
            assert line and not line.endswith(b"\n") and len(line) < 400_000
            while not line.endswith(b"\n"):
                line += await loop.sock_recv(slow, 1 << 16)
        assert [job["id"] for job in json.loads(line)["result"]] == list(range(10, 60))
        events = await site.client.events()
        assert [job.id for job in events.jobs] == list(range(10, 60)) and events.complete


async def test_an_answer_that_cannot_be_made_to_its_end_is_the_brokers_own_failure(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answers, "AT_ONCE", 1)

    async def answer(*_: object) -> list[object]:
        return [1, object()]

    monkeypatch.setattr(server, "identify", AsyncMock(return_value=Peer(1, UnixAccount.named("root"), False)))
    async with server.Server(settings, cast(Any, SimpleNamespace(answer=answer))), asyncio.timeout(HANG):
        reader, writer = await asyncio.open_unix_connection(settings.broker.socket)
        writer.write(b'{"method": "jobs"}\n')
        assert not (await reader.read()).endswith(b"\n")
        writer.close()
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (record.name, record.message) == ("carme.broker", "An answer could not be written.")
    assert record.exc_info and "PydanticSerializationError" in str(record.exc_info[0])
