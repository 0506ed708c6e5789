"""The site's reverse proxy in small, behind which tests open the pages of a real session."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from playwright.async_api import Page, expect

from carme_spawner.names import ServerResolver

from ..conftest import Site

__all__ = [
    "BASE",
    "STOPPED",
    "UNREACHED",
    "Front",
    "Gate",
    "has_loaded",
    "hurry",
    "launcher_has_focus",
    "open_gate",
]

BASE = "/jupyter/user/ada/s1/"
HOP = {"connection", "content-encoding", "content-length", "host", "transfer-encoding", "upgrade"}
#: Parts of JupyterLab, named by their content: most of a page's bytes, and the same for each session.
NAMED_BY_CONTENT = re.compile(r"/static/lab/[\w.-]*[0-9a-f]{16}[\w.-]*$")
#: What the hub's proxy answers for a server that it cannot reach, and for one that does not run.
UNREACHED, STOPPED = 503, 424


@dataclass
class Front:
    """What a test's pages get: the portal's answer about the session, else that of the session's server.

    Attributes:
        name: The session's.
        portal_reply: What the portal says of the session; None: it does not answer.
        questions: How often each path was requested.
        status: What the session says of its time instead of its server.
        sent: The form with which a new start of the session was requested.
        pages: Parts of the portal, by their paths.
        held: A part of a path; requests with it wait until `go_on` is set, as over a slow network.
        missing: Paths that the portal does not know.
        signed_out: Whether the portal leads to its login instead of stopping the session.
        full: A part of a path; documents with it cannot be saved, as on a full disk.
        gone: What the hub's proxy answers instead of the session's server; 0: that is there.
        saved_answers: Answers whose paths name their content.
    """

    site: Site
    token: str
    client: aiohttp.ClientSession
    process: asyncio.subprocess.Process
    url: str
    name: str = "s1"
    portal_reply: dict[str, object] | None = None
    status: dict[str, object] | None = None
    questions: Counter[str] = field(default_factory=Counter)
    sent: dict[str, object] | None = None
    pages: dict[str, str] = field(default_factory=dict)
    held: str = "nothing is held"
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    missing: set[str] = field(default_factory=set)
    signed_out: bool = False
    full: str = "nothing is full"
    gone: int = 0
    sockets: set[web.WebSocketResponse] = field(default_factory=set)
    saved_answers: dict[str, tuple[dict[str, str], bytes]] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Where the session's pages are."""
        return f"/jupyter/user/ada/{self.name}/"

    @property
    def home(self) -> Path:
        """The home of ada."""
        return self.site.broker.socket.parent

    async def lose_server(self, status: int = STOPPED) -> None:
        """From now on there is no server, as after a crash; the real one goes on for other tests."""
        self.gone = status
        await self.close_sockets()

    async def close_sockets(self) -> None:
        await asyncio.gather(*(socket.close() for socket in [*self.sockets]))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.questions[request.path] += 1
        if self.held in f"{request.method} {request.path}":
            await self.go_on.wait()
        if self.status and request.path == f"{self.base}carme/status":
            return web.json_response(self.status)
        if request.path in self.missing:
            raise web.HTTPNotFound
        if request.method == "PUT" and "/api/contents/" in request.path and self.full in request.path:
            return web.json_response({"message": "No space left on device"}, status=500)
        if request.path in self.pages:
            return web.Response(text=self.pages[request.path], content_type="text/html")
        if request.path.startswith(f"/sessions/{self.name}/"):
            return await self._answer_as_portal(request)
        if not request.path.startswith(self.base) or self.base not in self.site.routes:
            return web.json_response({"message": "No server"}, status=STOPPED)
        if self.gone:
            return web.json_response({"message": "No server"}, status=self.gone)
        try:
            return await self._pass_on(request, self.site.routes[self.base]["target"])
        except aiohttp.ClientError:
            return web.json_response({"message": "No server"}, status=UNREACHED)

    async def _answer_as_portal(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix(f"/sessions/{self.name}/")
        if self.signed_out and path == "stop/":
            raise web.HTTPSeeOther("/login")
        if (request.method, path) == ("POST", "again/"):
            self.sent = dict(await request.post())
            raise web.HTTPSeeOther(f"/sessions/{self.sent['name']}/")
        if (request.method, path) == ("POST", "stop/") and self.portal_reply:
            self.sent = dict(await request.post())
            self.portal_reply |= {"over": True, "state": "ended", "sentence": "You stopped this session."}
            self.process.terminate()
            raise web.HTTPSeeOther(f"/sessions/{self.name}/")
        return web.json_response(self.portal_reply) if self.portal_reply else web.Response(status=502)

    async def _pass_on(self, request: web.Request, target: str) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._connect(request, target)
        path = request.path.removeprefix(self.base)
        if path in self.saved_answers:
            headers, body = self.saved_answers[path]
            return web.Response(headers=headers, body=body)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        headers["Authorization"] = f"token {self.token}"
        url, sent = f"{target}{request.path_qs}", await request.read()
        async with self.client.request(
            request.method, url, headers=headers, data=sent, allow_redirects=False
        ) as answer:
            saved = {key: value for key, value in answer.headers.items() if key.lower() not in HOP}
            body = await answer.read()
        if answer.status == 200 and NAMED_BY_CONTENT.search(request.path):
            saved["Cache-Control"] = "max-age=31536000, immutable"
            self.saved_answers[path] = saved, body
        return web.Response(status=answer.status, headers=saved, body=body)

    async def _connect(self, request: web.Request, target: str) -> web.WebSocketResponse:
        offered = [word.strip() for word in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        offered = [word for word in offered if word]
        url = f"{target.replace('https', 'wss')}{request.path_qs}"
        headers = {"Authorization": f"token {self.token}"}
        async with self.client.ws_connect(url, headers=headers, protocols=offered, max_msg_size=0) as there:
            here = web.WebSocketResponse(protocols=[there.protocol] if there.protocol else (), max_msg_size=0)
            await here.prepare(request)
            self.sockets.add(here)

            async def pass_on(source: AsyncIterator[aiohttp.WSMessage], sink: object) -> None:
                async for message in source:
                    send = sink.send_bytes if message.type is aiohttp.WSMsgType.BINARY else sink.send_str  # type: ignore[attr-defined]
                    await send(message.data)

            directions = [asyncio.ensure_future(pass_on(*pair)) for pair in ((here, there), (there, here))]  # type: ignore[arg-type]
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            self.sockets.discard(here)
            await here.close()
            return here


@dataclass
class Gate:
    """The site's address, which stays: browsers keep what they have loaded from it for the next test.

    Attributes:
        front: What answers there now.
    """

    site: Site
    client: aiohttp.ClientSession
    url: str = ""
    front: Front | None = None
    _saved_answers: dict[str, tuple[dict[str, str], bytes]] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def opened_on(self, job_id: int, name: str = "s1") -> AsyncIterator[Front]:
        """A front of a session of ada's, which answers meanwhile."""
        token, process = self.site.token(job_id), self.site.broker.processes[job_id]
        self.front = front = Front(
            self.site, token, self.client, process, self.url, name=name, saved_answers=self._saved_answers
        )
        yield front
        self.front = None
        front.go_on.set()
        await front.close_sockets()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await self.front.answer(request) if self.front else web.Response(status=502)


@contextlib.asynccontextmanager
async def open_gate(site: Site) -> AsyncIterator[Gate]:
    """The address of a site, at which nothing answers yet."""
    connector = aiohttp.TCPConnector(resolver=ServerResolver(), ssl=site.proxys_certificate())
    async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as client:
        gate = Gate(site, client)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", gate.answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        gate.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield gate
        await runner.cleanup()


async def hurry(page: Page) -> None:
    """Let what the next page does after 5 s and more come ten times sooner.

    JupyterLab and Carme's parts of it wait so long before they ask again whether the session is there.
    """
    await page.add_init_script(
        """
        const later = window.setTimeout;
        window.setTimeout = (action, milliseconds, ...more) =>
          later(action, milliseconds < 5000 ? milliseconds : milliseconds / 10, ...more);
        """
    )


async def has_loaded(page: Page) -> None:
    """Wait until JupyterLab's page has what it needs: without its server it would complain of the rest."""
    await expect(page.locator("#carme-session-time")).to_be_attached()
    await expect(page.locator("body[data-jp-theme-name]")).to_be_attached()
    await expect(page.locator("#jupyterlab-splash")).to_have_count(0)


async def launcher_has_focus(page: Page) -> None:
    """Wait until JupyterLab's page has loaded and given the focus to its launcher.

    It makes the launcher when it has the list of the home's files, at times after all else. That takes the
    focus from what a test has tabbed to meanwhile.
    """
    await has_loaded(page)
    await page.wait_for_function(
        "document.activeElement?.closest('.jp-MainAreaWidget')?.querySelector('.jp-Launcher')"
    )
