"""A real nginx with the role's configuration, before servers that stand for portal and hub.

What a template does not set is inherited from nginx.conf, whose values are meant for web pages. Here all of
these are far too small: whatever a location inherits fails at once, and "for an hour" is half a second.
"""

import asyncio
import os
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import real_nginx
import yaml
from aiohttp import web
from free_ports import free_port
from yarl import URL

#: Five times as long as what nginx.conf allows below.
IDLE = 0.5
#: Bytes of a header that both ends take.
LARGEST = 1 << 20
NOTEBOOK = "/jupyter/user/ada/s1"

pytestmark = real_nginx.needed


async def answer(request: web.Request) -> web.StreamResponse:
    """What portal and hub answer here: the last word of the path says how."""
    match request.path.rpartition("/")[2]:
        case "enter":
            return web.Response(status=204)
        case "events":
            stream = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
            )
            await stream.prepare(request)
            await stream.write(b"data: first\n\n")
            await asyncio.sleep(IDLE)
            await stream.write(b"data: last\n\n")
            return stream
        case "channels":
            channel = web.WebSocketResponse(max_msg_size=0, autoping=False)
            await channel.prepare(request)
            async for message in channel:
                await channel.send_bytes(b"x" * int(message.data))
            return channel
        case "early":
            return web.Response(text="begun")
        case "slow" | "servers":
            await asyncio.sleep(IDLE)
            return web.Response(text="late")
        case "large":
            return web.Response(body=b"x" * int(request.query["size"]))
        case "headers":
            return web.Response(headers={"X-Large": "x" * 30_000})
    size = 0
    async for part in request.content.iter_any():
        size += len(part)
    return web.json_response({"size": size, "headers": sum(map(len, request.headers.values()))})


@dataclass
class Door:
    """The address of nginx, and a browser."""

    port: int
    browser: aiohttp.ClientSession

    def at(self, path: str) -> str:
        return f"https://127.0.0.1:{self.port}{path}"

    async def put(self, path: str, data: object) -> tuple[int, int]:
        """Status, and how many bytes arrived."""
        async with self.browser.put(self.at(path), data=data) as reply:
            return reply.status, (await reply.json())["size"] if reply.status == 200 else 0


@dataclass
class Block:
    """A block of nginx's configuration: what it says itself, and the blocks in it."""

    name: str
    own: dict[str, str] = field(default_factory=dict)
    inner: list["Block"] = field(default_factory=list)

    def locations(self, inherited: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Locations that pass requests on, with the directives that apply; `inherited`: those around them."""
        valid = inherited | self.own
        if "proxy_pass" in self.own:
            yield self.name, valid
        for block in self.inner:
            yield from block.locations(valid)


def read(text: str) -> Block:
    """nginx's configuration; of a directive that stands there several times, the last."""
    stack, words = [Block("")], list[str]()
    for word in re.findall(r"""#[^\n]*|"[^"]*"|'[^']*'|[{};]|[^\s{};]+""", text):
        match word:
            case "{":
                stack[-1].inner.append(Block(" ".join(words)))
                stack.append(stack[-1].inner[-1])
            case "}":
                stack.pop()
            case ";":
                stack[-1].own[words[0]] = " ".join(words[1:])
            case _:
                words += [] if word.startswith("#") else [word]
                continue
        words = []
    assert len(stack) == 1
    return stack[0]


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h|d)", text.strip()).groups()  # pyright: ignore
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]


def test_no_location_ends_what_is_silent_for_an_hour(tmp_path: Path) -> None:
    real_nginx.configure(tmp_path, 8443, 8100)
    text = (tmp_path / "carme.conf").read_text()
    found = dict(read(text).locations({}))
    assert len(found) == len(re.findall(r"^\s*proxy_pass ", text, re.MULTILINE)) > 5
    limits = ("client_body_timeout", "send_timeout", "proxy_read_timeout", "proxy_send_timeout")
    # A directive that is not set is inherited from nginx.conf, where it may have any value.
    short = {
        (name, limit)
        for name, valid in found.items()
        for limit in limits
        if seconds(valid.get(limit, "0s")) < 3600
    }
    # The portal answers at once who may enter.
    assert short == {("location = /internal/enter", "proxy_read_timeout")}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    port, backend = free_port(), free_port()
    real_nginx.configure(tmp_path, port, backend)
    application = web.Application()
    application.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(
        application, handler_cancellation=True, max_line_size=LARGEST, max_field_size=LARGEST
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", backend).start()
    trust = ssl.create_default_context(cafile=str(tmp_path / "site.pem"))
    trust.check_hostname = False
    try:
        async with (
            real_nginx.running(tmp_path, port),
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=trust), max_line_size=LARGEST, max_field_size=LARGEST
            ) as browser,
        ):
            yield Door(port, browser)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("size", [1_100_000, 100_000_000])
async def test_a_large_notebook_is_saved(door: Door, size: int) -> None:
    assert await door.put(f"{NOTEBOOK}/api/contents/big.ipynb", b"x" * size) == (200, size)


async def test_an_upload_of_gigabytes_is_let_in(door: Door) -> None:
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=trust)
    writer.write(
        f"PUT {NOTEBOOK}/early HTTP/1.1\r\nHost: localhost\r\nContent-Length: {9 << 30}\r\n\r\n".encode()
    )
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_an_upload_and_a_download_may_pause(door: Door) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        await asyncio.sleep(IDLE)
        yield b"x" * 100_000

    async def pausing(path: str, size: int) -> None:
        async with door.browser.get(door.at(f"{path}/large?size={size}")) as reply:
            await asyncio.sleep(IDLE)
            assert len(await reply.read()) == size

    uploads = [door.put(f"{path}/file", slowly()) for path in (NOTEBOOK, "/files")]
    downloads = [pausing(path, 20_000_000) for path in (NOTEBOOK, "/files")]
    sizes = asyncio.gather(*uploads)
    await asyncio.gather(*downloads)
    assert await sizes == [(200, 200_000)] * 2


async def test_an_answer_may_take_long(door: Door) -> None:
    async def requested(path: str) -> tuple[int, str]:
        async with door.browser.post(door.at(path), data=b"{}") as reply:
            return reply.status, await reply.text()

    paths = [f"{NOTEBOOK}/slow", "/slow", "/jupyter/hub/slow", "/jupyter/hub/api/users/ada/servers"]
    assert await asyncio.gather(*map(requested, paths)) == [(200, "late")] * len(paths)


async def test_events_may_be_far_between(door: Door) -> None:
    async def events(path: str) -> list[bytes]:
        async with door.browser.get(door.at(path)) as reply:
            return [await reply.content.readany(), await reply.read()]

    paths = [f"{NOTEBOOK}/events", "/events", "/jupyter/hub/events"]
    assert await asyncio.gather(*map(events, paths)) == [[b"data: first\n\n", b"data: last\n\n"]] * len(paths)


async def test_a_channel_may_be_silent_and_its_messages_large(door: Door) -> None:
    async with door.browser.ws_connect(door.at(f"{NOTEBOOK}/channels"), max_msg_size=0) as channel:
        await asyncio.sleep(IDLE)
        await channel.send_str("50000000")
        assert len(await channel.receive_bytes()) == 50_000_000


@pytest.mark.parametrize("path", [NOTEBOOK, "/jobs", "/jupyter/hub"])
async def test_addresses_and_headers_may_be_long(door: Door, path: str) -> None:
    headers = {f"X-Long-{number}": "x" * 12_000 for number in range(3)}
    async with door.browser.get(door.at(f"{path}/file"), headers=headers) as reply:
        assert reply.status == 200 and (await reply.json())["headers"] > 36_000
    async with door.browser.get(door.at(f"{path}/file?{'x' * 12_000}")) as reply:
        assert reply.status == 200
    async with door.browser.get(door.at(f"{path}/headers")) as reply:
        assert reply.status == 200 and len(reply.headers["X-Large"]) == 30_000


@pytest.mark.parametrize(
    ("written", "status"),
    [
        *[("ada", 200), ("anna.maria", 200), ("x@lab.org", 200), ("a%2Bb", 200), ("a%2Bb@lab.org", 200)],
        *[
            ("a%2Bb%2Bc", 200),
            ("a%2B%2B", 200),
            ("a" + "%2Bb" * 8, 200),
            ("a%2Bb%252Bc", 400),
            ("a%2B/b", 200),
        ],
        *[("a%252Bb", 400), ("a%2Fb", 400), ("a%2B..%2Fb", 400), ("ada%00", 400), ("%61da", 400)],
    ],
)
async def test_names_are_let_in_as_jupyterhub_writes_them(door: Door, written: str, status: int) -> None:
    address = URL(door.at(f"/jupyter/user/{written}/s1/lab"), encoded=True)
    async with door.browser.get(address) as reply:
        assert reply.status == status


async def test_the_portal_takes_a_part_of_a_file_and_no_more(door: Door) -> None:
    assert await door.put("/files/upload/", b"x" * (8 << 20)) == (200, 8 << 20)
    assert (await door.put("/files/upload/", b"x" * (11 << 20)))[0] == 413


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_addresses_of_version_6_are_named_only_where_the_kernel_has_them(
    tmp_path: Path, has_ipv6: bool
) -> None:
    """Booted with ipv6.disable=1 it has none, and nginx would refuse its whole configuration."""
    tasks = yaml.safe_load((real_nginx.ROLE / "tasks/main.yml").read_text())
    names = [task["name"] for task in tasks]
    (search,) = (task for task in tasks if task.get("register") == "reverse_proxy_ipv6")
    assert search["ansible.builtin.stat"]["path"] == "/proc/net/if_inet6"
    assert names.index(search["name"]) < names.index("Configure nginx")
    found = {"stat": {"exists": has_ipv6}}
    real_nginx.configure(tmp_path, 8443, 8100, reverse_proxy_port=443, reverse_proxy_ipv6=found)
    listens = re.findall(r"listen (\S+?);? ", (tmp_path / "carme.conf").read_text())
    assert listens == (["80", "[::]:80", "443", "[::]:443"] if has_ipv6 else ["80", "443"])


@pytest.mark.parametrize("former", ["", "# Carme's, as it was.\n"])
def test_a_site_that_nginx_does_not_accept_is_put_back(
    playbook: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    former: str,
) -> None:
    """Otherwise nginx would fail at its next start, and with it all sites that it serves."""
    names = ["Read how nginx is configured for it now", "Configure nginx"]
    names.append("Keep the site only if nginx accepts it")
    text = (real_nginx.ROLE / "tasks/main.yml").read_text()
    tasks = yaml.safe_load(text.replace("/etc/nginx/", f"{tmp_path}/"))
    welcome = [task for task in tasks if "welcome page" in task["name"]]
    found = [task for task in tasks if task["name"] in names]
    assert [task["name"] for task in found] == names and len(welcome) == 2
    # nginx.conf and the unit are changed afterwards: no handler is lost when the run ends here.
    later = tasks[tasks.index(found[2]) + 1 :]
    assert {"ansible.builtin.replace", "notify"} <= {word for task in later for word in task}
    assert [
        task["notify"] for task in tasks if task.get("notify") == "Restart nginx" and task not in later
    ] == []
    (tmp_path / "sites-enabled").mkdir()
    page = tmp_path / "sites-enabled/default"
    page.symlink_to("../sites-available/default")
    place, wanted = tmp_path / "carme.conf", tmp_path / "wanted"
    if former:
        place.write_text(former)
    found[1]["ansible.builtin.template"] = {"src": str(wanted), "dest": str(place), "mode": "0644"}
    for task in (found[1], welcome[1]):
        del task["notify"]
    account = {"owner": os.geteuid(), "group": os.getegid()}
    found[2]["rescue"][0]["ansible.builtin.copy"] |= account
    play = tmp_path / "play.yml"
    play.write_text(yaml.safe_dump([{"hosts": "portal", "gather_facts": False, "tasks": welcome + found}]))
    text = real_nginx.MAIN.format(folder=tmp_path, master="", limits="")
    (tmp_path / "nginx.conf").write_text(text)
    program = tmp_path / "bin/nginx"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {real_nginx.NGINX} -p {tmp_path} -c {tmp_path}/nginx.conf "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    def run() -> subprocess.CompletedProcess[str]:
        options = ["-i", "portal,", "-c", "local", "-e", f"reverse_proxy_site_file={place}"]
        return playbook(*options, play)

    wanted.write_text(f"server {{ listen unix:{tmp_path}/door; no_such_word; }}\n")
    done = run()
    assert done.returncode != 0, done.stdout
    text = " ".join(done.stdout.split())
    assert "no_such_word" in text and "was put back as it was" in text
    assert (place.read_text() if place.exists() else "") == former
    assert page.readlink() == Path("../sites-available/default")
    wanted.write_text(f"server {{ listen unix:{tmp_path}/door; }}\n")
    done = run()
    # It counts as changed again, so that nginx reads it.
    assert done.returncode == 0 and "changed=2" in done.stdout, done.stdout + done.stderr
    assert not page.is_symlink()
    assert place.read_text() == wanted.read_text()
