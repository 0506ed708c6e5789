"""A hub in this process, beside the real broker, whose jobs are local processes."""

import asyncio
import contextlib
import json
import os
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import httpx
import pytest
from free_ports import free_port
from jupyterhub import orm
from jupyterhub.auth import DummyAuthenticator
from jupyterhub.proxy import Proxy

from carme.config import Settings
from carme.errors import InvalidRequest
from carme_spawner.hub import CarmeHub
from carme_spawner.hub_config import hub_config
from carme_spawner.names import ServerResolver
from carme_spawner.watcher import JobWatcher
from patience import HANG

from .local_broker import LocalBroker, broker_settings

TOKEN = "portal-token-for-tests"


class FakeProxy(Proxy):
    """Keeps routes as a proxy that outlives the hub would."""

    routes: dict[str, dict[str, Any]] = {}  # noqa: RUF012  shared on purpose

    should_start = False

    async def add_route(self, routespec: str, target: str, data: dict[str, Any]) -> None:
        self.routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec: str) -> None:
        self.routes.pop(routespec, None)

    async def get_all_routes(self) -> dict[str, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(self.routes)


@dataclass
class Site:
    """A site with a broker and, between `up` and `down`, a hub."""

    settings: Settings
    broker: LocalBroker
    hub: CarmeHub | None = None
    routes: dict[str, dict[str, Any]] = field(default_factory=lambda: FakeProxy.routes)

    async def up(self) -> None:
        config = hub_config(self.settings)
        config.JupyterHub.authenticator_class = DummyAuthenticator
        config.JupyterHub.proxy_class = FakeProxy
        config.JupyterHub.log_level = "WARN"
        config.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0.3, "slow_stop_timeout": 60}
        config.DummyAuthenticator.allow_all = True
        CarmeHub.clear_instance()
        self.hub = CarmeHub.instance(config=config)
        # A signal must end the tests: otherwise the hub would handle it in their process and fail a test.
        self.hub.init_signal = lambda: None
        await self.hub.initialize([])
        await self.hub.start()

    async def down(self) -> None:
        """End the hub as a signal would: its tasks are cut off, jobs live on."""
        assert self.hub and self.hub.http_server
        self.hub.http_server.stop()
        await self.hub.http_server.close_all_connections()
        self.hub.metrics_collector.stop()
        for callback in self.hub._periodic_callbacks.values():
            callback.stop()
        doomed: list[asyncio.Task[Any]] = [self.hub.cleaning_up]
        for user in self.hub.users.values():
            for spawner in user.spawners.values():
                spawner.stop_polling()
                if spawner._spawn_future:
                    doomed.append(spawner._spawn_future)
        for watcher in JobWatcher._shared.pop(asyncio.get_running_loop(), {}).values():
            doomed += [watcher._task, *watcher.notes._last.values()]
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        await self.hub.cleanup()
        self.hub.db.close()
        CarmeHub.clear_instance()
        self.hub = None

    async def api(
        self, method: str, path: str, token: str = TOKEN, server: int | None = None, **arguments: Any
    ) -> httpx.Response:
        """Ask the hub, with the certificate of the proxy or of the server of job `server`."""
        url = f"{self.settings.hub.listen}{self.settings.hub.base_path}hub/api/{path}"
        context = self.proxys_certificate() if server is None else self.servers_certificate(server)
        async with httpx.AsyncClient(timeout=HANG, verify=context) as client:
            return await client.request(method, url, headers={"Authorization": f"token {token}"}, **arguments)

    async def report(self, job_id: int, what: str, **arguments: Any) -> httpx.Response:
        """What the server of a job reports to the hub: `ready`, `activity` or `extend`."""
        return await self.api("POST", f"carme/{what}", token=self.token(job_id), server=job_id, **arguments)

    def proxys_certificate(self) -> ssl.SSLContext:
        """TLS as the proxy speaks it, to the hub and to servers."""
        folder = self.settings.hub.state_directory / "certificates"
        return context(
            folder / "proxy-client-ca_trust.crt",
            folder / "proxy-client/proxy-client.crt",
            folder / "proxy-client/proxy-client.key",
        )

    def servers_certificate(self, job_id: int) -> ssl.SSLContext:
        """TLS as the server of a job speaks it."""
        folder = self.broker.folder(job_id) / "files"
        return context(folder / "singleuser-ca.crt", folder / "singleuser.crt", folder / "singleuser.key")

    async def visit(
        self, path: str, token: str = "", name: str = "s1", post: object = None, method: str = ""
    ) -> tuple[int, bytes]:
        """What a session's server answers to the proxy: status and body."""
        target = self.routes[f"/jupyter/user/ada/{name}/"]["target"]
        headers = {"Authorization": f"token {token}"} if token else {}
        connector = aiohttp.TCPConnector(resolver=ServerResolver(), ssl=self.proxys_certificate())
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.request(
                method or ("GET" if post is None else "POST"),
                f"{target}/jupyter/user/ada/{name}{path}",
                headers=headers,
                json=post,
            ) as answer,
        ):
            return answer.status, await answer.read()

    async def start(self, name: str = "s1", user: str = "ada", **options: Any) -> httpx.Response:
        """Start a server and return the answer, which comes when its job has been submitted."""
        await self.api("POST", f"users/{user}")
        before = len(self.broker.requests)
        options = options or {"image": "torch", "minutes": 60}
        response = await self.api("POST", f"users/{user}/servers/{name}", json=options)
        if response.status_code == 202:
            await eventually(lambda: len(self.broker.requests) > before, "the job is submitted")
            # Only tests of that end a hub before the broker has answered.
            if self.broker.answering.is_set():
                await eventually(lambda: self.knows_job(name, user), "the hub knows the number of the job")
        return response

    def knows_job(self, name: str, user: str) -> bool:
        """Whether the hub knows the job of a session, or that it has none any more."""
        assert self.hub
        spawner = next(account for account in self.hub.users.values() if account.name == user).spawners[name]
        return bool(spawner.job_id) or not spawner.pending

    async def runs(self, name: str = "s1", user: str = "ada") -> None:
        """Wait until the hub knows that the job of a session runs."""

        def known() -> bool:
            assert self.hub
            spawner = next(account for account in self.hub.users.values() if account.name == user).spawners[
                name
            ]
            job = spawner.watcher.find(int(spawner.job_id)) if spawner.job_id else None
            return bool(job and job.is_running)

        await eventually(known, "the hub knows that the job runs")

    def wait_for_outcome(self) -> None:
        """From now on, starts answer when they have succeeded or failed."""
        assert self.hub
        self.hub.tornado_application.settings["slow_spawn_timeout"] = HANG

    async def server(self, name: str = "s1", user: str = "ada") -> dict[str, Any] | None:
        """The server as the portal sees it; None once it has stopped."""
        model = (await self.api("GET", f"users/{user}")).json()
        return model["servers"].get(name)

    async def events(self, received: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """All progress events of ada's session s1 until its start has succeeded or failed.

        Args:
            received: Gets each event as it comes.
        """
        found = [] if received is None else received
        url = f"{self.settings.hub.listen}{self.settings.hub.base_path}hub/api/users/ada/servers/s1/progress"
        headers = {"Authorization": f"token {TOKEN}"}
        async with (
            httpx.AsyncClient(timeout=HANG, verify=self.proxys_certificate()) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line.removeprefix("data: ")))
        return found

    async def is_ready(self, name: str = "s1", user: str = "ada") -> bool:
        server = await self.server(name, user)
        return bool(server and server["ready"])

    async def is_gone(self, name: str = "s1", user: str = "ada") -> bool:
        return await self.server(name, user) is None

    def token(self, job_id: int) -> str:
        return self.broker.requests[job_id].request.environment["JUPYTERHUB_API_TOKEN"]


def context(authorities: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS of a client that shows a certificate and trusts nobody but `authorities`."""
    trusted = ssl.create_default_context(cafile=str(authorities))
    trusted.load_cert_chain(certificate, key)
    return trusted


async def eventually(condition: Callable[[], Awaitable[Any] | Any], what: str) -> None:
    """Wait until something is so; the bound only keeps a failing test from hanging."""
    end = time.monotonic() + HANG
    while time.monotonic() < end:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"It never came to this: {what}")


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """JupyterHub writes the proxy's token into the environment of its process."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's state, which holds the certificates of all tests: making them takes a second."""
    return tmp_path_factory.mktemp("hub")


def settings_of(folder: Path, state_directory: Path) -> Settings:
    """The settings of a site that has all but the hub's state in a folder."""
    secrets = folder / "secrets"
    secrets.mkdir()
    for name in ("hub-cookie-secret", "hub-crypt-key"):
        (secrets / name).write_text("5a" * 32 + "\n")
    for name in ("proxy-auth-token", "oidc-client-secret"):
        (secrets / name).write_text(f"{name}-value\n")
    (secrets / "hub-api-token").write_text(TOKEN + "\n")
    return Settings.model_validate(
        {
            "site": {"url": "https://carme.example.org"},
            **broker_settings(folder),
            "hub": {
                "listen": f"https://127.0.0.1:{free_port()}",
                "state_directory": str(state_directory),
                "database": f"sqlite:///{folder}/hub.sqlite",
            },
            "secrets": {"directory": str(secrets)},
        }
    )


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's database with its tables, which take long to make; a `lasting` site's hub makes its own."""
    file = tmp_path_factory.mktemp("database") / "hub.sqlite"
    with patch("logging.config.fileConfig"):  # it would be that of all tests
        database = orm.new_session_factory(f"sqlite:///{file}")
    database.kw["bind"].dispose()
    return file


@pytest.fixture
def settings(tmp_path: Path, state_directory: Path, empty_database: Path) -> Settings:
    shutil.copyfile(empty_database, tmp_path / "hub.sqlite")
    return settings_of(tmp_path, state_directory)


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Site]:
    """A site with its broker and its hub."""
    broker = LocalBroker(settings)
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(broker.close)
        opened.push_async_callback(broker.end_all)
        await broker.open()
        site = Site(settings, broker)
        await site.up()
        yield site
        if site.hub:
            await site.down()


@contextlib.asynccontextmanager
async def lasting(folder: Path, state_directory: Path) -> AsyncIterator[Site]:
    """A site for several tests, which leave it as it is; all of it but the hub's state is in a folder."""
    async with contextlib.AsyncExitStack() as opened:
        opened.enter_context(patch.object(FakeProxy, "routes", {}))
        with (
            patch.dict(os.environ),
            contextlib.chdir(folder),
        ):  # the first test finds what the last one leaves
            site = await opened.enter_async_context(running(settings_of(folder, state_directory)))
        yield site


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, an environment and routes for a hub in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FakeProxy, "routes", {})
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, "")  # the hub sets them, and other tests shall not have them


@pytest.fixture
async def site(settings: Settings, apart: None) -> AsyncIterator[Site]:
    async with running(settings) as site:
        yield site


NO_GPU = InvalidRequest(
    "A node has at most 4 GPUs; 9 were requested.", "Ask for 1 to 4.", field="gpus_per_node"
)
