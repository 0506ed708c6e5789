"""The single-user server inside a job: JupyterLab on the node's cluster address, reported to the hub at once.

Installed in job images without this package's dependencies: it may import JupyterHub's and Jupyter's own
packages only.
"""

import asyncio
import json
import os
import socket
import sys
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from jupyter_server.serverapp import ServerApp
from jupyterhub.singleuser.extension import JupyterHubSingleUser
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

#: Seconds for which the server tries to reach a hub that is down, before it gives its nodes back.
PATIENCE = 600.0
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0


def cluster_address() -> str:
    """The address of this node at which the hub and its proxy can reach it."""
    name = os.environ.get("SLURMD_NODENAME")
    if name:
        try:
            for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
                address = str(entry[4][0])
                # Many systems map their own name to 127.0.1.1, which nobody else can reach.
                if not ip_address(address.partition("%")[0]).is_loopback:
                    return address
        except OSError:
            pass
    hub = urlsplit(os.environ["JUPYTERHUB_API_URL"])
    where = socket.getaddrinfo(hub.hostname, hub.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(where[0], socket.SOCK_DGRAM) as probe:
        # No packet is sent: this asks the routing table which of our addresses leads to the hub.
        probe.connect(where[4])
        return str(probe.getsockname()[0])


class SessionServer(JupyterHubSingleUser):
    """JupyterHub's server extension, which takes a free port and tells the hub about it."""

    #: Whether the server ended because it could not report.
    failed = False

    @property
    def app(self) -> ServerApp:
        """The server that this extends."""
        assert self.serverapp is not None
        return self.serverapp

    def load_config_file(self) -> None:
        """The hub's settings, then ours: home as root, any free port."""
        super().load_config_file()
        # Port 0 is replaced by a free one when the server's socket is made.
        self.config.ServerApp.port = 0
        self.config.ServerApp.terminals_enabled = True
        self.app.update_config(self.config)

    async def check_hub_version(self) -> None:
        """Nothing: a hub that restarts just now is no reason to end; `report` waits for it."""

    async def _start_jupyter_server_extension(self, serverapp: Any) -> None:
        """Called by Jupyter Server as soon as it listens."""
        # Not awaited, or the other extensions would wait for the hub.
        self._report = asyncio.create_task(self.report())

    async def report(self) -> None:
        """Tell the hub where this server is; end the server if the hub refuses it or stays away."""
        body = {"port": self.app.port, "host": self.app.ip, "pid": os.getpid()}
        request = HTTPRequest(
            os.environ["JUPYTERHUB_API_URL"] + "/carme/ready",
            method="POST",
            headers={
                "Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}",
                "Content-Type": "application/json",
            },
            body=json.dumps(body),
            request_timeout=20,
        )
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + PATIENCE, FIRST_DELAY
        while True:
            try:
                await AsyncHTTPClient().fetch(request)
                self.log.info(
                    "The hub knows that this server listens at %s port %s.", *list(body.values())[1::-1]
                )
                return
            except HTTPClientError as error:
                answer = error.response.body.decode(errors="replace") if error.response else ""
                if 400 <= error.code < 500:
                    self.log.critical(
                        "The hub refuses this server, which ends now. Start the session again. %s", answer
                    )
                    break
                problem: object = f"{error} {answer}"
            except OSError as error:
                problem = error
            if loop.time() > deadline:
                self.log.critical(
                    "The hub was not there for %d minutes, so this server ends. Start the session again.",
                    PATIENCE / 60,
                )
                break
            self.log.warning("The hub does not answer yet: %s", problem)
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_DELAY)
        type(self).failed = True
        self.app.stop()


def main() -> None:
    """`carme-singleuser`: run the server; needs the environment that the hub gives to its servers."""
    missing = [n for n in ("JUPYTERHUB_API_URL", "JUPYTERHUB_API_TOKEN") if not os.environ.get(n)]
    if missing:
        sys.exit(
            f"carme-singleuser: {' and '.join(missing)} must be set. "
            "Only the hub starts this program, in the job of a session."
        )
    if not sys.flags.no_user_site:
        # What users install in their home must not keep the server from starting; their kernels still see it.
        os.execv(sys.executable, [sys.executable, "-s", "-m", "carme_spawner.singleuser", *sys.argv[1:]])
    address = cluster_address()
    # The port in here is a placeholder, see load_config_file.
    os.environ["JUPYTERHUB_SERVICE_URL"] = f"http://{f'[{address}]' if ':' in address else address}:1"
    os.environ.setdefault("JUPYTERHUB_ROOT_DIR", "~")
    SessionServer.launch_instance()
    if SessionServer.failed:
        sys.exit(1)


if __name__ == "__main__":
    # Under its real name, by which Jupyter Server loads the extension a second time.
    from carme_spawner import singleuser

    singleuser.main()
