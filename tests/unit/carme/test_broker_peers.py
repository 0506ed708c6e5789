"""Peers that send nonsense, are slow or are many; and the broker's clients."""

import asyncio
import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from carme.broker import AsyncBrokerClient, BrokerClient, protocol
from carme.errors import BrokerUnavailable, CarmeError, Denied, InvalidRequest
from carme.jobs import JobRequest

from .conftest import RUNNING


async def raw(site: Any, data: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket, limit=1 << 24)
    writer.write(data)
    answer = await reader.readline()
    writer.close()
    return json.loads(answer)


# Bad peers


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\n", "The broker does not know this method|not valid"),
        (b"{}\n", "does not know this method"),
        (b'{"method": "fly"}\n', "It knows: access, bring, cancel"),
        (b'{"method": 3}\n', "does not know this method"),
        (b'{"method": "job"}\n', "'job_id' is missing"),
        (b'{"method": "job", "job_id": 0}\n', "'job_id' must be at least 1, not 0"),
        (b'{"method": "job", "job_id": 1, "usr": "x"}\n', "There is no field 'usr'.*'user'"),
        (b'{"method": "submit", "request": {"nam": 1}}\n', "'minutes' is missing"),
        (b'{"method": "submit", "request": 3}\n', "must be a table, not 3"),
        (b'{"method": "events", "wait": NaN}\n', "not valid"),
        (b'{"method": "jobs", "user": "a\\u0000b"}\n', "may not act for"),
        (b"[" * 10000 + b"\n", "not valid"),
        (b"\xff\xfe\n", "not valid"),
        (b"GET / HTTP/1.1\r\n\r\n", "not valid"),
    ],
)
async def test_malformed_requests_get_an_answer(site: Any, line: bytes, words: str) -> None:
    error = (await raw(site, line))["error"]
    with pytest.raises(CarmeError, match=words):
        raise CarmeError(error["message"], error["remedy"])
    assert await site.client.jobs() == []


async def test_the_broker_outlives_noise(site: Any) -> None:
    import random

    noise = random.Random(1)
    for _ in range(100):
        line = bytes(noise.randrange(256) for _ in range(noise.randrange(80))).replace(b"\n", b"")
        assert (await raw(site, line + b"\n"))["error"]
    assert await site.client.jobs() == []


async def test_a_huge_request_is_refused(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket)
    writer.write(b"x" * (protocol.MAXIMUM_LINE + 10) + b"\n")
    answer = json.loads(await reader.readline())
    assert "longer than 1048576 bytes" in answer["error"]["message"]
    assert await reader.read() == b""
    writer.close()


async def test_a_request_that_is_too_large_is_refused_by_the_client(site: Any, order: JobRequest) -> None:
    with pytest.raises(InvalidRequest, match=r"at most 1048576 are allowed. Put large values into a file"):
        await site.client.submit(order.model_copy(update={"environment": {"A": "x" * (1 << 20)}}))


@pytest.mark.parametrize("line_seconds", [0.5])
async def test_a_slow_writer_is_sent_away(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket)
    writer.write(b'{"method": ')
    assert "No request arrived" in json.loads(await reader.readline())["error"]["message"]
    assert await reader.read() == b""
    writer.close()


async def test_a_half_request_gets_an_answer(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket)
    writer.write(b'{"method": "cluster"}')
    writer.write_eof()
    assert "without a line end" in json.loads(await reader.readline())["error"]["message"]
    writer.close()


async def test_several_requests_on_one_connection_are_answered_in_order(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket, limit=1 << 20)
    writer.write(b'{"method": "jobs"}\n{"method": "nope"}\n{"method": "jobs"}\n')
    answers = [json.loads(await reader.readline()) for _ in range(3)]
    assert [answer["error"] is None for answer in answers] == [True, False, True]
    writer.close()


async def test_one_user_cannot_take_all_connections(site: Any) -> None:
    cursor = (await site.client.events()).cursor
    line = json.dumps({"method": "events", "cursor": cursor, "wait": 30}).encode() + b"\n"
    streams = []
    for _ in range(16):
        streams.append(await asyncio.open_unix_connection(site.settings.broker.socket))
        streams[-1][1].write(line)
    with pytest.raises(CarmeError, match="ada has 16 connections to the broker already") as caught:
        await site.client.jobs()
    assert caught.value.code == "busy"
    site.slurm.jobs = [RUNNING]
    for reader, writer in streams:
        assert json.loads(await reader.readline())["result"]["jobs"][0]["id"] == 7
        writer.close()


async def test_jobs_submitted_at_once_get_different_numbers(site: Any, order: JobRequest) -> None:
    site.act("hub", trusted=True)
    ids = await asyncio.gather(*(site.client.submit(order, user="ada") for _ in range(12)))
    assert len(set(ids)) == 12
    assert sorted(job.id for job in await site.client.jobs()) == sorted(ids)


async def test_a_defect_is_one_failed_request(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr("carme.broker.jobs.Jobs.history", broken)
    with pytest.raises(CarmeError, match="The broker failed at this request") as caught:
        await site.client.history()
    assert caught.value.code == "internal"
    assert await site.client.jobs() == []


async def test_the_socket_is_for_everybody(site: Any) -> None:
    assert stat.S_IMODE(site.settings.broker.socket.stat().st_mode) == 0o666


# Clients


async def test_both_clients_have_the_same_methods_and_docstrings(site: Any) -> None:
    client = BrokerClient(site.settings.broker.socket)
    assert await asyncio.to_thread(client.jobs) == await site.client.jobs()
    with pytest.raises(Denied, match="may not act for 'bob'"):
        await asyncio.to_thread(client.jobs, user="bob")

    def methods(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert methods(BrokerClient) == methods(AsyncBrokerClient)
    assert methods(BrokerClient) == protocol.OPERATIONS.keys() - {
        "files"
    }  # which hands the connection over: open_files


async def test_clients_report_a_broker_that_is_down(tmp_path: Path) -> None:
    for words in ("no such file", "refused"):
        with pytest.raises(
            BrokerUnavailable, match=f"does not answer: .*{words}.*systemctl status carme-broker"
        ):
            await AsyncBrokerClient(tmp_path / "s").jobs()
        with pytest.raises(BrokerUnavailable, match=words):
            BrokerClient(tmp_path / "s").jobs()
        if words == "no such file":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(tmp_path / "s"))


@pytest.mark.parametrize("answer", [b"", b"what?\n", b'{"result": "x"}\n', b'{"result": 7'])
async def test_clients_report_a_broker_whose_answer_is_invalid(tmp_path: Path, answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(talk, tmp_path / "s"):
        with pytest.raises(BrokerUnavailable):
            await AsyncBrokerClient(tmp_path / "s").jobs()
        with pytest.raises(BrokerUnavailable):
            await asyncio.to_thread(BrokerClient(tmp_path / "s").jobs)


async def test_only_the_user_and_services_learn_which_accounts_the_user_coordinates(site: Any) -> None:
    assert await site.client.coordinated_accounts() == ["physics"]
    with pytest.raises(Denied):
        await site.client.coordinated_accounts(user="bob")
    site.act("hub", trusted=True)
    assert await site.client.coordinated_accounts(user="bob") == []
    assert await site.client.coordinated_accounts() == []
