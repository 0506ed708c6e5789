"""The real single-user server, started by the hub as a job."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from carme_spawner.names import ServerResolver
from carme_spawner.singleuser.certificates import Certificates
from carme_spawner.singleuser.hub import Hub, Refused, Unanswered
from patience import HANG

from .conftest import Site, eventually

COMMAND = [sys.executable, "-m", "carme_spawner.singleuser", "--allow-root"]


async def leave(site: Site) -> None:
    """End the servers, and remove what an epilog would remove."""
    await site.broker.end_all()
    for process in site.broker.processes.values():
        shutil.rmtree(Path(tempfile.gettempdir(), f"carme-{process.pid}"), ignore_errors=True)


async def test_a_users_own_settings_take_no_page_away(site: Site) -> None:
    folder = site.broker.socket.parent / ".jupyter"
    folder.mkdir()
    needed = ("jupyterlab", "jupyter_server_terminals", "jupyterhub.singleuser.extension")
    # `jupyter_lsp` is optional: images do without it.
    off = dict.fromkeys((*needed, "jupyter_lsp"), False)
    lines = [f"c.ServerApp.jpserver_extensions = {off}", "c.ServerApp.sock = 'x.sock'"]
    (folder / "jupyter_server_config.py").write_text("\n".join(lines))
    settings = {"ServerApp": {"jpserver_extensions": off, "terminals_enabled": False}}
    (folder / "jupyter_server_config.json").write_text(json.dumps(settings))
    site.broker.command = COMMAND
    await site.start()
    await eventually(site.is_ready, "JupyterLab is ready")
    token = site.token(100)
    assert (await site.visit("/lab", token))[0] == 200
    assert (await site.visit("/api/terminals", token, post={}))[0] == 200
    # Requests of JupyterLab's pages are answered even if an extension is missing or a file is broken.
    assert await site.visit("/lsp/status", token) == (200, b'{"version": 2, "sessions": {}, "specs": {}}')
    (folder / "lab/workspaces").mkdir(parents=True)
    for name, text in (("cut", ""), ("other", "{}"), ("whole", '{"data": {}, "metadata": {"id": "w"}}')):
        (folder / f"lab/workspaces/{name}-1a2b.jupyterlab-workspace").write_text(text)
    status, body = await site.visit("/lab/api/workspaces", token)
    assert (status, json.loads(body)["workspaces"]["ids"]) == (200, ["cut", "other", "w"])
    await leave(site)


@contextlib.asynccontextmanager
async def websockets(
    server: Site,
) -> AsyncIterator[Callable[[str, str], Awaitable[aiohttp.ClientWebSocketResponse]]]:
    """Gives what opens a WebSocket at a path of ada's server with a token, as the proxy does."""
    target = server.routes["/jupyter/user/ada/s1/"]["target"].replace("https", "wss")
    connector = aiohttp.TCPConnector(resolver=ServerResolver(), ssl=server.proxys_certificate())
    async with aiohttp.ClientSession(connector=connector) as client:

        async def connect(path: str, token: str) -> aiohttp.ClientWebSocketResponse:
            url = f"{target}/jupyter/user/ada/s1/{path}"
            return await client.ws_connect(url, max_msg_size=0, headers={"Authorization": f"token {token}"})

        yield connect


#: The same, however long its pages take to save.
PATIENT = f"""
from carme_spawner.singleuser import main, server
server.SAVE_SECONDS = {HANG}
main()
"""


async def test_the_servers_end_waits_until_open_pages_have_saved(site: Site) -> None:
    site.broker.command = [sys.executable, "-c", PATIENT, "--allow-root"]
    await site.start()
    await eventually(site.is_ready, "JupyterLab is ready")
    token, process = site.token(100), site.broker.processes[100]
    async with websockets(site) as connect:
        pages = [await connect("api/events/subscribe", token) for _ in range(2)]
        process.terminate()
        for page in pages:
            event = await page.receive_json(timeout=HANG)
            assert (event["schema_id"], event["state"]) == ("https://schema.carme/session", "ending")
        assert (await site.visit("/carme/saved", token, post={}))[0] == 204
        await asyncio.sleep(1)
        assert process.returncode is None  # the second page is not done
        assert (await site.visit("/carme/saved", post={}))[0] == 403
        assert (await site.visit("/carme/saved", token, post={}))[0] == 204
        async with asyncio.timeout(HANG):
            await process.wait()
    await leave(site)


async def test_certificates_that_are_not_whole_end_it(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/singleuser.key").touch()
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JUPYTERHUB_API_URL": "https://127.0.0.1:9",
        "JUPYTERHUB_API_TOKEN": "x",
        "CARME_JOB_FOLDER": str(tmp_path),
    }
    result = await asyncio.to_thread(
        subprocess.run, COMMAND, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert result.returncode == 1
    assert "singleuser.crt" in result.stderr
    assert "Start the session again." in result.stderr


@pytest.fixture
async def hub(site: Site, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub as a server sees it whose job runs and which has not reported yet."""
    site.broker.command = ["sleep", "600"]
    await site.start()
    await site.runs()
    for name, value in site.broker.requests[100].request.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CARME_JOB_FOLDER", str(site.broker.folder(100)))
    return Hub(Certificates.of_job())


REPORT = {"port": 40123, "host": "127.0.0.1", "pid": 1}


async def test_a_server_with_a_wrong_token_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "0" * 32)
    with pytest.raises(Refused):
        await hub.announce(REPORT)


async def test_a_server_waits_for_a_hub_that_restarts(site: Site, hub: Hub) -> None:
    await site.down()
    report = asyncio.create_task(hub.announce(REPORT))
    await asyncio.sleep(0.5)
    assert not report.done()
    await site.up()
    await report


async def test_a_server_gives_up_if_the_hub_stays_away(site: Site, hub: Hub) -> None:
    await site.down()
    with pytest.raises(Unanswered):
        await hub.announce(REPORT, patience=0.3)


async def test_the_hubs_refusal_of_more_time_is_its_sentence(site: Site, hub: Hub) -> None:
    assert set(await hub.post("extend", {"minutes": 5})) == {"ends", "minutes_limit", "warned"}
    with pytest.raises(Refused, match="minutes"):
        await hub.post("extend", {"minutes": -5})


def test_the_server_imports_nothing_of_the_hub_and_explains_itself(tmp_path: Path) -> None:
    code = (
        "import sys, carme_spawner.singleuser as server\n"
        "from carme_spawner.singleuser import imports\n"
        "imports.prepare()\n"
        "import carme_spawner.singleuser.server\n"
        "unwanted = {'batchspawner', 'oauthenticator', 'sqlalchemy', 'jupyterhub.orm', 'pydantic'}\n"
        "unwanted |= {name for name in sys.modules if name.startswith('carme.')}\n"
        "wanted = {name for name in unwanted if name.startswith('carme.translation')}\n"
        "print((unwanted - wanted) & set(sys.modules))\n"
        "import jupyterhub.orm, sqlalchemy; jupyterhub.orm.User, sqlalchemy.Column\n"
        "server.main()"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert result.stdout.strip() == "set()", result.stderr
    assert result.returncode == 1
    assert "JUPYTERHUB_API_TOKEN must be set" in result.stderr
