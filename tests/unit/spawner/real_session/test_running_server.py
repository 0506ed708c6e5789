"""A real single-user server, started by the hub as a job, as its hub and browsers meet it."""

import asyncio
import json
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from carme.jobs import JobState
from carme.sessions import Step
from carme_spawner.names import address_in
from patience import HANG

from ..conftest import NO_GPU, Site, eventually
from ..test_singleuser import websockets
from .conftest import FOLDER

pytestmark = pytest.mark.asyncio(loop_scope="package")


def marks_of(server: Site, job_id: int) -> dict[Step, float]:
    """When the session of a job reached each step, as the broker knows it."""
    marks = [mark for number, note in server.broker.notes if number == job_id for mark in note.marks]
    return {mark.step: mark.at.timestamp() for mark in marks}


async def test_the_server_reports_to_the_hub_and_requests_a_login(server: Site, job_id: int) -> None:
    status, body = await server.visit("/api")
    assert status == 200
    assert "version" in json.loads(body)
    assert (await server.visit("/api/contents"))[0] == 403
    status, body = await server.visit("/api/contents", server.token(job_id))
    assert status == 200, server.broker.log(job_id)


async def test_another_users_token_opens_nothing(server: Site) -> None:
    server.broker.command = None  # her job waits
    await server.start(user="eve")
    number = max(server.broker.requests)
    for path in ("/api/contents", "/carme/status", "/app/mine/", "/tensorboard/"):
        assert (await server.visit(path, server.token(number)))[0] == 403, path
    await server.broker.finish(number, JobState.CANCELLED)


async def test_the_server_listens_on_one_address_and_requires_a_certificate(server: Site) -> None:
    target = urlsplit(server.routes["/jupyter/user/ada/s1/"]["target"])
    assert target.hostname
    assert target.port
    address = address_in(target.hostname)
    assert address is not None
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.2", target.port)
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, ConnectionError)):
        reader, writer = await asyncio.open_connection(address, target.port, ssl=stranger)
        writer.write(b"GET /jupyter/user/ada/s1/api HTTP/1.0\r\n\r\n")
        if not await reader.read():
            raise ConnectionError


async def test_the_server_reports_when_its_job_reached_each_step(
    server: Site, job_id: int, starts: dict[int, float]
) -> None:
    marks = marks_of(server, job_id)
    assert marks[Step.PROLOG] == 1.5e9
    assert starts[job_id] - 1 <= marks[Step.CONTAINER] <= marks[Step.LISTENING] <= time.time()


async def test_a_browser_gets_pages_and_the_hub_is_notified_of_the_first(server: Site, job_id: int) -> None:
    token = server.token(job_id)
    status, page = await server.visit("/lab", token)
    assert status == 200
    assert b"carme-session" in page and b"carme-use" in page  # the panels are among the page's extensions
    await eventually(lambda: Step.FIRST_PAGE in marks_of(server, job_id), "the hub heard of the first page")
    status, body = await server.visit("/carme/status", token)
    assert status == 200
    assert json.loads(body)["extend"] is True


async def test_more_time_is_requested_from_the_hub(
    server: Site, job_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = server.token(job_id)
    status, body = await server.visit("/carme/extend", token, post={"minutes": 30})
    assert status == 200
    assert set(json.loads(body)) == {"ends", "minutes_limit", "warned"}
    monkeypatch.setattr(server.broker, "refuse", NO_GPU)
    status, body = await server.visit("/carme/extend", token, post={"minutes": 30})
    assert (status, json.loads(body)) == (400, {"message": str(NO_GPU)})
    for wrong in ({}, {"minutes": 0}, {"minutes": "5"}, {"minutes": True}, []):
        assert (await server.visit("/carme/extend", token, post=wrong))[0] == 400, wrong
    assert (await server.visit("/carme/extend", post={"minutes": 30}))[0] == 403


async def test_signing_out_closes_what_a_browser_has_open_and_nothing_else(server: Site) -> None:
    hub: Any = server.hub
    ada = next(user for user in hub.users.values() if user.name == "ada")
    browser, key = ada.new_api_token(session_id="a-browser"), ada.new_api_token()
    _, body = await server.visit("/api/terminals", key, post={})
    path = f"terminals/websocket/{json.loads(body)['name']}"
    async with websockets(server) as connect:
        sockets = [await connect(path, token) for token in (browser, browser, key)]
        assert (await server.api("DELETE", "carme/logins/ada")).status_code == 204
        for socket in sockets[:2]:
            async with asyncio.timeout(HANG):
                while (await socket.receive()).type is not aiohttp.WSMsgType.CLOSE:
                    pass
            assert socket.close_code == 1008
        await sockets[2].send_json(["stdin", "echo $((6 * 7))\r"])
        async with asyncio.timeout(HANG):
            while "42" not in str((await sockets[2].receive()).data):
                pass
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await connect(path, browser)
    # What the server had remembered about that login is forgotten.
    assert (await server.visit("/api/contents", browser))[0] == 403


async def test_kernels_compute_out_of_others_reach(server: Site, job_id: int) -> None:
    token = server.token(job_id)
    _, body = await server.visit("/api/kernels", token, post={"name": "python3"})
    kernel = json.loads(body)["id"]
    content = {"code": "6 * 7", "silent": False, "store_history": False, "user_expressions": {}}
    header = {"msg_id": "1", "msg_type": "execute_request", "session": "s", "username": "", "version": "5.3"}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    async with websockets(server) as connect:
        socket = await connect(f"api/kernels/{kernel}/channels", token)
        await socket.send_json(message)
        while (answer := await socket.receive_json())["msg_type"] != "execute_result":
            pass
        assert answer["content"]["data"]["text/plain"] == "42"
        # A cell, or a file for a widget, may be larger than Tornado's 10 MiB; what a kernel says, too.
        content["code"] = f"{'x' * (11 << 20)!r}"
        await socket.send_json(message)
        while (answer := await socket.receive_json())["msg_type"] != "execute_result":
            pass
    assert len(answer["content"]["data"]["text/plain"]) == (11 << 20) + 2
    # Anyone who may connect to a kernel can read its output: no other user of the node gets to its sockets.
    folder = FOLDER / "jupyter"
    assert json.loads((folder / f"kernel-{kernel}.json").read_text())["transport"] == "ipc"
    assert [part.stat().st_mode & 0o777 for part in (folder, folder.parent)] == [0o700, 0o700]
