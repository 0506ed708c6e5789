"""The page's snippets for an nginx and an Apache in front of Carme's nginx, with real servers."""

import re
import shutil
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import real_apache
import real_nginx
from aiohttp import web
from free_ports import free_port
from yarl import URL

NAME = "carme.example.org"
PAGE = (Path(__file__).resolve().parents[3] / "docs/admins/certificates.md").read_text()
#: The address of the browser; that of the servers in front is 127.0.0.1.
CLIENT = "127.0.0.2"

pytestmark = real_nginx.needed


def snippet(server: str) -> str:
    (text,) = re.findall(rf"```{server}\n(.*?)```", PAGE, re.DOTALL)
    return text


async def answer(request: web.Request) -> web.StreamResponse:
    """What portal and hub answer: what arrived."""
    if request.path.endswith("/enter"):
        return web.Response(status=204)
    if request.headers.get("Upgrade"):
        channel = web.WebSocketResponse(max_msg_size=0)
        await channel.prepare(request)
        async for message in channel:
            await channel.send_bytes(bytes(int(message.data)))
        return channel
    size = 0
    async for part in request.content.iter_any():
        size += len(part)
    shown = ["Host", "X-Real-IP", *(f"X-Forwarded-{what}" for what in ("For", "Proto", "Host", "Port"))]
    return web.json_response(
        {"path": request.raw_path, "size": size, **{name: request.headers.get(name) for name in shown}}
    )


@dataclass
class Front:
    """A browser of the site, and the address of the server in front."""

    browser: aiohttp.ClientSession
    port: int

    def at(self, path: str) -> URL:
        return URL(f"https://127.0.0.1:{self.port}{path}", encoded=True)


def prepared(server: str, folder: Path, port: int, inner: int, trust: Path) -> str:
    """The snippet with this machine's ports and files."""
    folder.mkdir()
    real_nginx.make_certificate(folder, NAME, "front")
    text = snippet(server)
    for there, here in (
        ("/etc/ssl/carme.example.org.pem", folder / "front.pem"),
        ("/etc/ssl/private/carme.example.org.key", folder / "front-key.pem"),
        ("/etc/ssl/carme-head.pem", trust),
        ("10.1.0.10:443", f"127.0.0.1:{inner}"),
        ("listen 443 ", f"listen 127.0.0.1:{port} ") if server == "nginx" else ("*:443", f"127.0.0.1:{port}"),
    ):
        assert there in text
        text = text.replace(there, str(here))
    return text


async def in_front(server: str, folder: Path, inner: int, trust: Path) -> AsyncIterator[int]:
    """The server of the snippet; its port."""
    port = free_port()
    text = prepared(server, folder, port, inner, trust)
    if server == "apache":
        async with real_apache.running(folder, port, text):
            yield port
    else:
        real_nginx.write(folder, text, limits="")  # of a site
        async with real_nginx.running(folder, port):
            yield port


@pytest.fixture(params=["nginx", pytest.param("apache", marks=real_apache.needed)])
async def front(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Front]:
    inner, backend = free_port(), free_port()
    application = web.Application()
    application.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(
        application, handler_cancellation=True, max_line_size=1 << 20, max_field_size=1 << 20
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", backend).start()
    real_nginx.configure(
        *(tmp_path, inner, backend),
        carme_site_url=f"https://{NAME}",
        reverse_proxy_host=NAME,
        reverse_proxy_site_port=443,
        reverse_proxy_in_front=["127.0.0.1"],
    )
    trust = tmp_path / "head.pem"
    shutil.copy(tmp_path / "site.pem", trust)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with real_nginx.running(tmp_path, inner):
            async for port in in_front(request.param, tmp_path / "front", inner, trust):
                connector = aiohttp.TCPConnector(ssl=context, local_addr=(CLIENT, 0))
                headers = {"Host": NAME, "X-Forwarded-For": "192.0.2.1", "X-Real-IP": "192.0.2.1"}
                async with aiohttp.ClientSession(connector=connector, headers=headers) as browser:
                    yield Front(browser, port)
    finally:
        await runner.cleanup()


async def test_pages_come_through_with_the_address_of_their_client(front: Front) -> None:
    for path in ("/jobs?x=1", "/jupyter/hub/home", "/jupyter/user/ada/s1/lab"):
        async with front.browser.get(front.at(path)) as reply:
            assert reply.status == 200
            found = await reply.json()
        assert found == {
            "path": path,
            "size": 0,
            "Host": NAME,
            "X-Real-IP": CLIENT,
            "X-Forwarded-For": CLIENT,
            "X-Forwarded-Proto": "https",
            "X-Forwarded-Host": NAME,
            "X-Forwarded-Port": "443",
        }


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/jupyter/user/a%2Bb/s1/lab", 200),
        ("/jupyter/user/ada/s1/files/a%20b%23c%3Fd%25.ipynb", 200),
        ("/jupyter/user/ada/s1/api/contents/a%2Fb", 200),
        ("/jupyter/user/ada%2Fs1", 400),
        ("/jupyter/user/%61da/s1", 400),
    ],
)
async def test_addresses_stay_as_they_were_sent(front: Front, path: str, status: int) -> None:
    async with front.browser.get(front.at(path)) as reply:
        assert reply.status == status
        if status == 200:
            assert (await reply.json())["path"] == path


async def test_uploads_and_long_headers_come_through(front: Front) -> None:
    address = front.at("/jupyter/user/ada/s1/api/contents/big.ipynb")
    async with front.browser.put(address, data=b"x" * 30_000_000) as reply:
        assert reply.status == 200 and (await reply.json())["size"] == 30_000_000
    async with front.browser.get(address, headers={"X-Long": "x" * 12_000}) as reply:
        assert reply.status == 200


async def test_channels_of_notebooks_come_through(front: Front) -> None:
    async with front.browser.ws_connect(front.at("/jupyter/user/ada/s1/channels"), max_msg_size=0) as channel:
        await channel.send_str("5000000")
        assert len(await channel.receive_bytes()) == 5_000_000


async def test_addresses_from_an_unnamed_proxy_are_ignored(tmp_path: Path) -> None:
    """Else any client could choose its address, by which failed logins are counted."""
    real_nginx.configure(tmp_path, 8443, 8100)
    assert "real_ip" not in (tmp_path / "carme.conf").read_text()
