"""The real single-user server, started by the hub as a job."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

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


async def test_a_server_that_the_hub_refuses_ends(site: Site) -> None:
    site.broker.command = None
    await site.start()
    environment = site.broker.requests[100].request.environment
    environment["JUPYTERHUB_API_TOKEN"] = "0" * 32
    await site.broker.run(100, COMMAND)
    await eventually(lambda: site.broker.jobs[100].is_over, "the server has ended")
    assert site.broker.jobs[100].exit_code == 1
    assert "The hub refuses this server" in site.broker.logs[100]


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
