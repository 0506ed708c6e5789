"""A web app behind the real single-user server gets what a browser sent, and the browser what it answered."""

import asyncio
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tornado import httpserver, netutil, web, websocket
from yarl import URL

from carme_spawner.names import ServerResolver
from patience import HANG

from .conftest import eventually, lasting

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLOCK = Path(__file__).parents[2] / "simulated_clock.c"
HOUR = 3600
JOB = str(5_000_000 + os.getpid())
FOLDER = Path(f"/tmp/carme-{JOB}/apps")
PLACE = "/jupyter/user/ada/s1/app/echo"


@web.stream_request_body
class Echo(web.RequestHandler):
    """Answers with the request."""

    gone: asyncio.Event
    begun: asyncio.Future[None]

    def check_xsrf_cookie(self) -> None: ...

    def prepare(self) -> None:
        self.size, self.digest, self.waits = 0, hashlib.sha256(), False

    def data_received(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.request.path == "/long":
            Echo.begun.set_result(None)
        self.digest.update(chunk)

    async def answer(self) -> None:
        headers = {name.lower(): value for name, value in self.request.headers.items()}
        requested = {
            "method": self.request.method,
            "uri": self.request.uri,
            "size": self.size,
            "headers": headers,
        }
        self.set_header("X-Asked", json.dumps({"method": self.request.method, "uri": self.request.uri}))
        for number in range(2):
            self.add_header("Set-Cookie", f"c{number}=1; Path=/")
        match self.get_query_argument("do", ""):
            case "send":
                size = int(self.get_query_argument("size"))
                self.set_header("Content-Length", str(size))
                for begin in range(0, size, 1 << 20):
                    self.write(bytes(min(1 << 20, size - begin)))
                    await self.flush()
            case "wait":
                self.write("data: first\n\n")
                await self.flush()
                self.waits = True
                await Echo.gone.wait()
            case "redirect":
                self.redirect(self.get_query_argument("to"))
            case "break":
                self.write("begun")
                await self.flush()
                assert self.request.connection
                self.request.connection.stream.close()  # pyright: ignore
            case "code":
                self.set_status(int(self.get_query_argument("code")))
            case _:
                self.write(requested | {"sha256": self.digest.hexdigest()})

    get = post = put = delete = patch = options = head = answer

    def on_connection_close(self) -> None:
        if self.waits:  # that an upload was broken off is noticed at any time later
            Echo.gone.set()


class Channel(websocket.WebSocketHandler):
    """Echoes, and speaks one subprotocol."""

    closed: asyncio.Future[tuple[int | None, str | None]]

    def check_origin(self, origin: str) -> bool:
        return True

    async def get(self, *arguments: Any, **options: Any) -> None:
        if self.get_query_argument("refuse", ""):
            raise web.HTTPError(403)
        await super().get(*arguments, **options)

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        self.offered = subprotocols
        return "second" if "second" in subprotocols else None

    def open(self, *arguments: str, **options: str) -> None:
        self.write_message(json.dumps({"uri": self.request.uri, "offered": getattr(self, "offered", [])}))

    async def on_message(self, message: str | bytes) -> None:
        if message == "leave":
            self.close(4321, "as agreed")
        else:
            await self.write_message(message, binary=isinstance(message, bytes))

    def on_close(self) -> None:
        if self.get_query_argument("tell", ""):
            Channel.closed.set_result((self.close_code, self.close_reason))


@dataclass
class Browser:
    """What a signed-in browser sends to the session's server, byte for byte."""

    client: aiohttp.ClientSession
    server: str
    token: str
    hours: Path  # what lets them pass for the session's server

    def url(self, rest: str) -> URL:
        return URL(f"{self.server}{PLACE}{rest}", encoded=True)

    def ask(self, method: str, rest: str, **arguments: Any) -> Any:
        return self.client.request(method, self.url(rest), allow_redirects=False, **arguments)

    def channel(self, rest: str, **arguments: Any) -> Any:
        return self.client.ws_connect(self.url(rest), max_msg_size=0, **arguments)


@asynccontextmanager
async def app(path: Path) -> AsyncIterator[None]:
    """A user's own app, which listens where apps listen."""
    Echo.gone, Echo.begun = asyncio.Event(), asyncio.get_running_loop().create_future()
    application = web.Application(
        [(r"/ws.*", Channel), (r"/.*", Echo)],
        websocket_max_message_size=1 << 30,
        log_function=lambda handler: None,
    )
    server = httpserver.HTTPServer(application, max_body_size=1 << 40)
    server.add_socket(netutil.bind_unix_socket(str(path)))
    yield
    server.stop()
    await server.close_all_connections()


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that lets hours pass for the session's server."""
    library = tmp_path_factory.mktemp("clock") / "simulated_clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, CLOCK, "-ldl"], check=True)
    return library


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(
    clock: Path, tmp_path_factory: pytest.TempPathFactory, state_directory: Path
) -> AsyncIterator[Browser]:
    hours = clock.with_name("hours")
    hours.write_bytes(struct.pack("q", 0))
    async with lasting(tmp_path_factory.mktemp("site"), state_directory) as site:
        site.broker.command = [
            "env",
            f"LD_PRELOAD={clock}",
            f"SIMULATED_HOURS={hours}",
            f"SLURM_JOB_ID={JOB}",
            sys.executable,
            "-s",
            "-m",
            "carme_spawner.singleuser",
            "--allow-root",
        ]
        await site.start()
        await eventually(site.is_ready, "JupyterLab is ready")
        connector = aiohttp.TCPConnector(resolver=ServerResolver(), ssl=site.proxys_certificate())
        headers = {"Authorization": f"token {site.token(100)}"}
        async with (
            app(FOLDER / "echo.sock"),
            aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False) as client,
        ):
            yield Browser(client, site.routes["/jupyter/user/ada/s1/"]["target"], site.token(100), hours)
        process = site.broker.processes[100]
        if process.returncode is None:
            process.terminate()
            await process.wait()
    shutil.rmtree(FOLDER.parent)


# A session takes seconds to start, so that all of these share one.


async def test_requests_and_answers_are_passed_on_unchanged(browser: Browser) -> None:
    await an_app_sees_the_address_as_it_was_sent(browser)
    await every_method_with_and_without_a_body(browser)
    await redirects_stay_within_the_app(browser)
    await a_body_that_nobody_takes_is_not_waited_for(browser)
    await an_answer_that_breaks_off_is_not_taken_for_a_whole_one(browser)
    await what_an_app_says_in_between_comes_at_once_and_it_sees_the_browser_go(browser)


async def test_bodies_and_websockets_of_any_length_and_kind(browser: Browser) -> None:
    await bodies_of_any_length_go_through_both_ways(browser)
    await a_websocket_speaks_the_subprotocol_that_the_app_took(browser)
    await either_side_may_refuse_or_close_a_websocket(browser)
    await more_than_an_hour_of_silence_ends_nothing(browser)


async def an_app_sees_the_address_as_it_was_sent(browser: Browser) -> None:
    for rest in (
        "/a%20b",
        "/a%2Fb",
        "/%C3%BC",
        "/%FF",
        "/%25",
        "/a+b?c=%2F%26&d=e+f",
        "/a;b=1/(c)/~d",
        "/?a=%FF",
        "//x",
    ):
        async with browser.ask("GET", rest) as reply:
            assert reply.status == 200, rest
            assert (await reply.json())["uri"] == rest
        async with browser.channel(f"/ws{rest}") as channel:
            assert (await channel.receive_json())["uri"] == f"/ws{rest}"


async def every_method_with_and_without_a_body(browser: Browser) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        for data in (None, b"a body"):
            async with browser.ask(method, "/x", data=data) as reply:
                assert reply.status == 200, (method, data)
                seen = await reply.json()
                assert (seen["method"], seen["size"]) == (method, len(data or b""))
                assert seen["headers"]["x-forwarded-prefix"] == PLACE
                assert reply.headers.getall("Set-Cookie") == ["c0=1; Path=/", "c1=1; Path=/"]
    async with browser.ask("HEAD", "/x?do=send&size=5") as reply:
        assert (reply.status, reply.headers["Content-Length"], await reply.read()) == (200, "5", b"")
    for code in (204, 304, 418, 503):
        async with browser.ask("GET", f"/x?do=code&code={code}") as reply:
            assert (reply.status, await reply.read()) == (code, b"")


async def bodies_of_any_length_go_through_both_ways(browser: Browser) -> None:
    part = os.urandom(1 << 20)

    async def parts(number: int) -> AsyncIterator[bytes]:
        for _ in range(number):
            yield part

    async def endless() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.get_running_loop().create_future()

    async with browser.ask("GET", f"/x?do=send&size={101 << 20}") as reply:
        assert reply.status == 200
        size = 0
        async for received in reply.content.iter_any():
            size += len(received)
        assert size == 101 << 20
    expected = hashlib.sha256(part * 30).hexdigest()
    for headers in ({}, {"Content-Length": str(30 << 20)}):
        async with browser.ask("PUT", "/x", data=parts(30), headers=headers) as reply:
            seen = await reply.json()
            assert (seen["size"], seen["sha256"]) == (30 << 20, expected)
    # More than a request to the server itself may have: it is passed on as it comes, not gathered first.
    asking = asyncio.create_task(
        browser.ask("POST", "/long", data=endless(), headers={"Content-Length": str(9 << 30)})
    )
    async with asyncio.timeout(HANG):
        await Echo.begun
    asking.cancel()


async def what_an_app_says_in_between_comes_at_once_and_it_sees_the_browser_go(browser: Browser) -> None:
    reply = await browser.ask("GET", "/x?do=wait")
    assert await reply.content.readany() == b"data: first\n\n"
    assert not Echo.gone.is_set()
    reply.close()
    async with asyncio.timeout(HANG):
        await Echo.gone.wait()


async def a_body_that_nobody_takes_is_not_waited_for(browser: Browser) -> None:
    async with asyncio.timeout(HANG):
        async with browser.ask("POST", "", data=bytes(4 << 20)) as reply:
            assert (reply.status, reply.headers["Location"]) == (302, f"{PLACE}/")


async def an_answer_that_breaks_off_is_not_taken_for_a_whole_one(browser: Browser) -> None:
    with pytest.raises(aiohttp.ClientPayloadError):
        async with browser.ask("GET", "/x?do=break") as reply:
            await reply.read()


async def redirects_stay_within_the_app(browser: Browser) -> None:
    for to, arrives in (
        ("/login?next=%2F", f"{PLACE}/login?next=%2F"),
        (f"{PLACE}/login", f"{PLACE}/login"),
        ("relative", "relative"),
        ("https://carme.example.org/", "https://carme.example.org/"),
    ):
        async with browser.ask("GET", f"/x?do=redirect&to={to.replace('%', '%25')}") as reply:
            assert (reply.status, reply.headers["Location"]) == (302, arrives)


async def a_websocket_speaks_the_subprotocol_that_the_app_took(browser: Browser) -> None:
    async with browser.channel("/ws", protocols=("first", "second")) as channel:
        assert channel.protocol == "second"
        assert (await channel.receive_json())["offered"] == ["first", "second"]
        for size in (0, 1, 12 << 20):
            await channel.send_bytes(bytes(size))
            assert await channel.receive_bytes(timeout=HANG) == bytes(size)
        await channel.send_str("grüße")
        assert await channel.receive_str() == "grüße"
        await channel.send_str("leave")
        message = await channel.receive()
        assert (message.type, message.data, message.extra) == (aiohttp.WSMsgType.CLOSE, 4321, "as agreed")
    async with browser.channel("/ws", protocols=("first",)) as channel:
        assert channel.protocol is None


async def either_side_may_refuse_or_close_a_websocket(browser: Browser) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await browser.channel("/ws?refuse=1")
    assert refused.value.status == 403
    Channel.closed = asyncio.get_running_loop().create_future()
    async with browser.channel("/ws?tell=1") as channel:
        await channel.receive_json()
        await channel.close(code=4000, message=b"enough")
    async with asyncio.timeout(HANG):
        assert await Channel.closed == (4000, "enough")


async def more_than_an_hour_of_silence_ends_nothing(browser: Browser) -> None:
    Echo.gone = asyncio.Event()
    reply = await browser.ask("GET", "/x?do=wait")
    assert await reply.content.readany() == b"data: first\n\n"
    async with browser.channel("/ws") as channel:
        await channel.receive_json()
        # In place: the server has mapped the file, and dies if it looks when that is empty.
        with browser.hours.open("r+b") as hours:
            hours.write(struct.pack("q", HOUR + 60))
        # Its timers are due when the server wakes, and what they begin when it wakes the next time.
        for _ in range(3):
            async with browser.ask("GET", "/x") as short_reply:
                assert short_reply.status == 200
        await channel.send_str("still here")
        assert await channel.receive_str(timeout=HANG) == "still here"
    assert not Echo.gone.is_set()
    Echo.gone.set()
    async with asyncio.timeout(HANG):
        assert await reply.read() == b""  # which would fail, had anybody ended it
