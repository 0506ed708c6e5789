"""The broker's real socket under malformed, huge, slow, broken-off and very many requests."""

import asyncio
import contextlib
import itertools
import json
import socket
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carme.broker import protocol
from carme.broker import server as server_module
from carme.broker.concurrency import ConcurrencyLimit
from carme.broker.peers import Peer
from carme.slurm import UnixAccount

# The broker of one test serves all its examples, which is the point.
many = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

METHODS = sorted(protocol.OPERATIONS)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# Names and values that mean something to Slurm's programs, to a shell, to paths and to the broker itself.
meaningful = st.sampled_from(
    ["root", "ada", "bob", "../..", "--uid=0", "$(id)", "a\nb", "\0", "%j", "-1", "0", "1e400", "\ud800"]
)
values = anything | meaningful
fields = st.sampled_from(
    ["user", "job_id", "request", "offset", "limit", "cursor", "since", "active", "name"]
)
# `events` may wait by right, so it is left out here.
requests = st.fixed_dictionaries(
    {"method": st.sampled_from([name for name in METHODS if name != "events"]) | values}
).flatmap(lambda base: st.dictionaries(fields, values, max_size=5).map(lambda more: base | more))
lines = st.one_of(
    st.binary(max_size=300).map(lambda raw: raw.replace(b"\n", b" ")),
    requests.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
    anything.map(lambda value: json.dumps(value).encode()),
    st.integers(1, 3000).map(lambda depth: b"[" * depth),
    st.integers(1, 3000).map(lambda depth: b'{"request":' * depth),
)


def is_answer(line: bytes) -> bool:
    """One JSON object with either a result or an error in whole sentences."""
    answer = json.loads(line)
    error = answer["error"]
    return error is None or bool(error["message"].strip() and "Traceback" not in error["message"])


async def connect(site: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(site.settings.broker.socket, limit=1 << 24)


async def lives(site: Any) -> bool:
    """The broker answers an honest client."""
    return isinstance(await site.client.jobs(), list)


@many
@given(sent=st.lists(lines, min_size=1, max_size=6))
async def test_every_line_gets_one_answer(site: Any, sent: list[bytes]) -> None:
    """Also when all of them come at once, before the first answer is read."""
    reader, writer = await connect(site)
    writer.write(b"".join(line + b"\n" for line in sent))
    for _ in sent:
        line = await reader.readline()
        assert is_answer(line)
        assert json.loads(line)["error"] is None or json.loads(line)["error"]["code"] != "internal"
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    assert await lives(site)
    # Whatever was in those lines, nobody but ada had a job started or ended.
    for call in (*site.slurm.calls("sbatch"), *site.slurm.calls("scancel")):
        assert call["uid"] == UnixAccount.named("ada").uid


@many
@given(data=st.binary(max_size=200), cut=st.integers(0, 200), how=st.sampled_from(["close", "abort", "eof"]))
async def test_connections_that_break_off_get_answers_to_their_whole_lines(
    site: Any, data: bytes, cut: int, how: str
) -> None:
    reader, writer = await connect(site)
    writer.write(data[:cut])
    match how:
        case "close":
            writer.close()
        case "abort":
            writer.transport.abort()
        case "eof":
            writer.write_eof()
            # An answer for each whole line and one for the rest, if there is one.
            part = data[:cut]
            answers = (await reader.read()).splitlines()
            assert len(answers) == part.count(b"\n") + (not part.endswith(b"\n") and bool(part))
            assert all(is_answer(line) for line in answers)
            writer.close()
    assert await lives(site)


async def test_broken_off_connections_leave_no_place_taken(site: Any) -> None:
    for _ in range(100):
        _, writer = await connect(site)
        writer.write(b'{"method": "jobs"}\n{"meth')
        writer.transport.abort()
    # All 16 connections of the user can still be had at the same time.
    streams = [await connect(site) for _ in range(16)]
    for reader, writer in streams:
        writer.write(b'{"method": "jobs"}\n')
        assert json.loads(await reader.readline())["error"] is None
    for _, writer in streams:
        writer.close()


@pytest.mark.parametrize(
    "size", [protocol.MAXIMUM_LINE - 1, protocol.MAXIMUM_LINE + 1, 20 * protocol.MAXIMUM_LINE]
)
async def test_lines_that_are_too_long_are_refused(site: Any, size: int) -> None:
    reader, writer = await connect(site)

    async def send() -> None:
        # The broker closes the connection of a line that is too long before it has received all of it.
        with contextlib.suppress(ConnectionError):
            writer.write(b" " * size + b"\n")
            await writer.drain()

    sending = asyncio.create_task(send())
    answer = await reader.readline()
    assert not answer or json.loads(answer)["error"]["code"] == "invalid"
    await sending
    writer.close()
    assert await lives(site)


@pytest.mark.parametrize("line_seconds", [10.0])
async def test_slow_clients_do_not_delay_two_hundred_others(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client is another user; three of them trickle, do not read, and do not hang up."""
    numbers = itertools.count(20_000)

    async def identify(*_: object) -> Peer:
        uid = next(numbers)
        return Peer(1, UnixAccount(f"user{uid}", uid, uid, "/nonexistent"), trusted=False)

    monkeypatch.setattr(server_module, "identify", identify)
    slow = [await connect(site) for _ in range(2)]
    slow[0][1].write(b'{"meth')
    slow[1][1].write(b'{"method": "cluster"}\n' * 20_000)  # its answers are never read

    # Not asyncio's streams: with a failure to write they forget what has come before.
    trickling = socket.socket(socket.AF_UNIX)
    trickling.connect(str(site.settings.broker.socket))

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in itertools.cycle(b'{"method": '):
                trickling.send(bytes([byte]))
                time.sleep(0.01)

    sending = asyncio.create_task(asyncio.to_thread(trickle))
    sent_away = asyncio.create_task(asyncio.to_thread(trickling.makefile("rb").readline))

    async def client() -> int:
        answered = 0
        for _ in range(5):
            answered += await site.client.jobs() == []
            answered += bool((await site.client.cluster()).nodes)
        return answered

    assert await asyncio.gather(*(client() for _ in range(200))) == [10] * 200
    # The slow ones are sent away and not waited for.
    assert "No request arrived" in json.loads(await sent_away)["error"]["message"]
    await sending
    trickling.close()
    for _, writer in slow:
        writer.transport.abort()


async def test_nobody_waits_for_one_who_wants_everything() -> None:
    shares = ConcurrencyLimit(4, 2)
    go_on = asyncio.Event()
    order: list[int] = []

    async def work(uid: int) -> None:
        async with shares.slot(uid):
            order.append(uid)
            await go_on.wait()

    greedy = [asyncio.create_task(work(1)) for _ in range(50)]
    await asyncio.sleep(0)
    modest = [asyncio.create_task(work(2)), asyncio.create_task(work(3))]
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(order) == [1, 1, 2, 3]
    go_on.set()
    await asyncio.gather(*greedy, *modest)
    assert len(order) == 52
