"""The real single-user server, started by the hub as a job."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from carme_spawner import singleuser
from carme_spawner.singleuser import SessionServer

from .conftest import Site, eventually

COMMAND = [sys.executable, "-m", "carme_spawner.singleuser", "--allow-root"]


async def test_jupyterlab_reports_to_the_hub_and_asks_for_a_login(site: Site) -> None:
    site.broker.command = COMMAND
    await site.start()
    await eventually(site.is_ready, "JupyterLab is ready")
    target = urlsplit(site.routes["/jupyter/user/ada/s1/"]["target"])
    assert target.hostname == "127.0.0.1"
    url = f"http://127.0.0.1:{target.port}/jupyter/user/ada/s1"

    def get(path: str, token: str = "") -> bytes:
        headers = {"Authorization": f"token {token}"} if token else {}
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers)) as answer:
            return answer.read()

    assert "version" in json.loads(await asyncio.to_thread(get, "/api"))
    try:
        await asyncio.to_thread(get, "/api/contents")
        raise AssertionError("the server answered a stranger")
    except urllib.error.HTTPError as error:
        assert error.code == 403


class Reporting(SessionServer):
    """The part that talks to the hub, without JupyterLab."""

    app = SimpleNamespace(port=40123, ip="127.0.0.1", stop=lambda: None)  # pyright: ignore


@pytest.fixture
async def reporting(site: Site, monkeypatch: pytest.MonkeyPatch) -> Reporting:
    """A server whose job runs and which has not reported yet."""
    site.broker.command = ["sleep", "60"]
    await site.start()
    for name, value in site.broker.requests[100].request.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Reporting, "failed", False)
    return Reporting()


async def test_a_server_that_the_hub_refuses_ends(
    reporting: Reporting, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "0" * 32)
    await reporting.report()
    assert reporting.failed
    assert "The hub refuses this server" in capfd.readouterr().err


async def test_a_server_waits_for_a_hub_that_restarts(site: Site, reporting: Reporting) -> None:
    await site.down()
    report = asyncio.create_task(reporting.report())
    await asyncio.sleep(0.5)
    assert not report.done()
    await site.up()
    await report
    assert not reporting.failed


async def test_a_server_gives_up_if_the_hub_stays_away(
    site: Site, reporting: Reporting, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(singleuser, "PATIENCE", 0.3)
    await site.down()
    await reporting.report()
    assert reporting.failed
    assert "The hub was not there" in capfd.readouterr().err


def test_it_needs_nothing_of_the_hubs_host_and_says_what_it_is_for(tmp_path: Path) -> None:
    code = (
        "import sys, carme_spawner.singleuser as server\n"
        "print({'carme', 'batchspawner', 'oauthenticator'} & set(sys.modules))\n"
        "server.main()"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert result.stdout.strip() == "set()"
    assert result.returncode == 1
    assert "JUPYTERHUB_API_TOKEN must be set" in result.stderr
