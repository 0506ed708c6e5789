"""Stands in for slurmrestd with what a real one answered (slurm_rest_24_11.json, or as a test sets it).

It records the requests.
"""

import json
import re
import socketserver
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "slurm_rest_24_11.json").read_text())
TOKEN = "eyJhbGciOi.eyJzdW4i.c2ln"
NO_SUCH_URL = b"Unable find requested URL. Please view /openapi/v3 for API reference."


class Request(NamedTuple):
    """A request."""

    method: str
    path: str
    user: str
    token: str
    body: Any


@dataclass
class RecordedRest:
    """What it answers.

    Attributes:
        version: The version that it knows.
        recorded: What a real one answered, by version and path.
        token: What it takes; empty: anything.
        answers: By path after the version, after `db` for the accounting's: status and body, instead of the
            recorded ones.
        cut: It breaks off in the middle of each answer.
        requests: Those that it got, but for the version.
    """

    version: str = "v0.0.42"
    recorded: Mapping[str, Any] = field(default_factory=lambda: RECORDED["rest"])
    token: str = TOKEN
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    cut: bool = False
    requests: list[Request] = field(default_factory=list)

    def answer(self, request: Request) -> tuple[int, bytes]:
        if self.token and request.token != self.token:
            return 401, b"Authentication failure"
        path = re.sub(rf"^/slurm(db)?/{self.version}/", lambda match: match[1] or "", request.path)
        if path == request.path:
            return 404, NO_SUCH_URL
        if path == "ping/":
            return 200, b'{"pings": [], "errors": []}'
        self.requests.append(request._replace(path=path))
        if path in self.answers:
            return self.answers[path]
        known = self.recorded[self.version].get(path.strip("/"))
        return (200, json.dumps(known).encode()) if known else (404, NO_SUCH_URL)


@contextmanager
def serving(rest: RecordedRest, where: Path | int, tls: ssl.SSLContext | None = None) -> Iterator[None]:
    """Serve until the block ends.

    Args:
        rest: What it answers.
        where: The path of a socket, or a port of 127.0.0.1.
        tls: Makes it speak TLS at the port.
    """

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            user, token = (self.headers.get(f"X-SLURM-USER-{name}", "") for name in ("NAME", "TOKEN"))
            status, answer = rest.answer(Request(self.command, self.path, user, token, body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer[: len(answer) // 2] if rest.cut else answer)

        do_GET = do_POST = do_DELETE = _any

        def address_string(self) -> str:
            return "socket"

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests read `requests`."""

    class Local(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    class Remote(socketserver.ThreadingMixIn, socketserver.TCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with (
        Remote(("127.0.0.1", where), Handler)
        if isinstance(where, int)
        else Local(str(where), Handler) as server
    ):
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
