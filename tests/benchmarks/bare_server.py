"""Runs on a compute node: starts single-user servers in the container alone, and times until they listen.

A stand-in answers for the hub: it knows one token, and takes every report. Each line of standard input is a
JSON list, the command to start, or `null`: end it. Each answer is a line of JSON: `{"seconds", "port"}`,
`{"error"}`, or `null`.

Arguments: the user, the node's address, the token that opens the server.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PATIENCE = 60
LOG = Path("bare-server.log")


class Reports:
    """What the server has reported to its hub: the port, and since when."""

    def __init__(self) -> None:
        self.port = 0
        self.listening = threading.Event()


class StandIn(BaseHTTPRequestHandler):
    """Just enough of JupyterHub's API."""

    reports: Reports
    token: str
    user: str

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/hub/api":
            return self.answer({"version": "6.1.1"})
        if self.headers.get("Authorization", "").partition(" ")[2] != self.token:
            return self.answer({"message": "no such token"}, 404)
        scopes = [f"access:servers!user={self.user}"]
        self.answer({"kind": "user", "name": self.user, "admin": False, "groups": [], "scopes": scopes})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if "port" in body:
            self.reports.port = int(body["port"])
        if self.path == "/hub/api/carme/ready":  # our server reports when it listens, the stock one before
            self.reports.listening.set()
        self.answer({"ends": None, "stops_idle": None, "idle_minutes": 0, "extend": False})

    def answer(self, body: dict[str, object], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the output belongs to the answers."""


def environment(user: str, token: str, hub_port: int) -> dict[str, str]:
    """What a hub gives to its servers; for Apptainer in both of the ways it takes variables."""
    hub, prefix = f"http://127.0.0.1:{hub_port}/hub", f"/user/{user}/bare/"
    given = {
        "JUPYTERHUB_API_TOKEN": token,
        "JUPYTERHUB_API_URL": f"{hub}/api",
        "JUPYTERHUB_ACTIVITY_URL": f"{hub}/api/users/{user}/activity",
        "JUPYTERHUB_BASE_URL": "/",
        "JUPYTERHUB_CLIENT_ID": f"jupyterhub-user-{user}-bare",
        "JUPYTERHUB_COOKIE_HOST_PREFIX_ENABLED": "0",
        "JUPYTERHUB_DEFAULT_URL": "/lab",
        "JUPYTERHUB_HOST": "",
        "JUPYTERHUB_OAUTH_ACCESS_SCOPES": json.dumps([f"access:servers!user={user}"]),
        "JUPYTERHUB_OAUTH_CALLBACK_URL": f"{prefix}oauth_callback",
        "JUPYTERHUB_OAUTH_CLIENT_ALLOWED_SCOPES": "[]",
        "JUPYTERHUB_OAUTH_SCOPES": json.dumps([f"access:servers!user={user}"]),
        "JUPYTERHUB_SERVER_NAME": "bare",
        "JUPYTERHUB_SERVICE_PREFIX": prefix,
        "JUPYTERHUB_SERVICE_URL": f"http://0.0.0.0:0{prefix}",
        "JUPYTERHUB_USER": user,
        "SLURMD_NODENAME": socket.gethostname(),
        "USER": user,
    }
    return os.environ | given | {f"APPTAINERENV_{name}": value for name, value in given.items()}


def begin(command: list[str], reports: Reports, server_environment: dict[str, str], address: str):
    """Start a server; the process and seconds until it listens."""
    with LOG.open("w") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=server_environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while time.perf_counter() - began < PATIENCE:
        if process.poll() is not None:
            break
        if reports.listening.wait(0.005) or (reports.port and listens(address, reports.port)):
            return process, time.perf_counter() - began
    end(process)
    raise RuntimeError(f"The server did not listen: {LOG.read_text(errors='replace')[-1500:]}")


def listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def end(process: "subprocess.Popen[bytes] | None") -> None:
    """End a server with all that it started."""
    if process is None:
        return
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def main(user: str, address: str, token: str) -> None:
    """Serve until standard input ends."""
    StandIn.user, StandIn.token = user, token
    hub = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    server_environment = environment(user, token, hub.server_port)
    process = None
    try:
        for line in sys.stdin:
            command = json.loads(line)
            end(process)
            process, answer = None, None
            if command:
                StandIn.reports = Reports()
                try:
                    process, seconds = begin(command, StandIn.reports, server_environment, address)
                    answer = {"seconds": seconds, "port": StandIn.reports.port}
                except (OSError, RuntimeError) as error:
                    answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        end(process)


if __name__ == "__main__":
    main(*sys.argv[1:])
