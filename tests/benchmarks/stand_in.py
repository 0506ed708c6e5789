"""Runs in a Slurm job in place of a single-user server: reports as the real one does, and answers HTTP.

    stand_in.py carme KEYFOLDER    in place of `carme-job`: ready, then activity every 30 s, over TLS where
                                   the hub delivered certificates
    stand_in.py batchspawner ...   in place of batchspawner's wrapper: its port

Only the standard library, and little of it: hundreds of these share a machine.
"""

import json
import os
import select
import socket
import ssl
import sys
import time
from pathlib import Path

ACTIVITY_SECONDS = 30.0
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Hub:
    """The hub's API as this server may use it."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None) -> None:
        _, _, rest = url.partition("://")
        where, _, path = rest.partition("/")
        self.host, _, port = where.partition(":")
        self.port, self.path, self.token, self.tls = int(port), f"/{path}", token, tls

    def post(self, what: str, content: dict[str, object]) -> int:
        """The status of the answer; 0 when there is none."""
        body = json.dumps(content)
        request = (
            f"POST {self.path}/{what} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Authorization: token {self.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
        )
        try:
            with socket.create_connection((self.host, self.port), timeout=20) as plain:
                stream = self.tls.wrap_socket(plain, server_hostname=self.host) if self.tls else plain
                with stream:
                    stream.sendall(request.encode())
                    return int(stream.recv(4096).split()[1])
        except (OSError, IndexError, ValueError):
            return 0


def serve(listener: socket.socket, tls: ssl.SSLContext | None, hub: Hub, reports_activity: bool) -> None:
    """Answer every request, and report, until a signal ends it."""
    due = time.monotonic() + ACTIVITY_SECONDS
    while True:
        wait = max(0.0, due - time.monotonic()) if reports_activity else None
        if select.select([listener], [], [], wait)[0]:
            try:
                plain, _ = listener.accept()
                plain.settimeout(5)
                with tls.wrap_socket(plain, server_side=True) if tls else plain as stream:
                    stream.recv(65536)
                    stream.sendall(ANSWER)
            except OSError:
                continue
        elif reports_activity:
            now = time.time()
            busy = {"kernels": now, "terminals": now, "gpus": None, "ranks": None}
            hub.post("carme/activity", {"busy_since_last": False, **busy})
            due = time.monotonic() + ACTIVITY_SECONDS


def announce(hub: Hub, what: str, content: dict[str, object]) -> None:
    """Report until the hub has taken it."""
    while not 200 <= (status := hub.post(what, content)) < 300:
        print(f"{what} was answered with {status}", flush=True)
        time.sleep(1)


def main(manner: str, *arguments: str) -> None:
    """Serve until ended."""
    begun = time.time()
    server_tls = client_tls = None
    given = dict(os.environ)
    address = "0.0.0.0"
    if manner == "carme":
        folder = Path(arguments[0])
        given |= json.loads((folder / "environment.json").read_text())
        key, certificate, authority = (
            folder / "files" / f"singleuser{suffix}" for suffix in (".key", ".crt", "-ca.crt")
        )
        if key.exists():
            server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            client_tls = ssl.create_default_context(cafile=authority)
            for context in (server_tls, client_tls):
                context.load_cert_chain(certificate, key)
        address = socket.gethostbyname(given["SLURMD_NODENAME"])
    hub = Hub(given["JUPYTERHUB_API_URL"], given["JUPYTERHUB_API_TOKEN"], client_tls)
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        if manner == "carme":
            marks = {"prolog": begun, "container": begun, "listening": time.time()}
            report = {"port": port, "host": address, "pid": os.getpid(), "marks": marks}
            announce(hub, "carme/ready", report)
        else:
            announce(hub, "batchspawner", {"port": port})
        serve(listener, server_tls, hub, manner == "carme")


if __name__ == "__main__":
    main(*sys.argv[1:])
