"""A hub that refuses, fails, is slow or says nothing when a test wants that: the part of JupyterHub's REST
API that the portal uses, as JupyterHub 6 answers it, on a real port.

It starts no servers and decides nothing: JupyterHub's own functions say which names are valid. The real hub
runs beside the real broker in `tests/unit/spawner`, and with the portal in `tests/unit/dev`.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from jupyterhub.slugs import is_valid_display_name, is_valid_safe_slug, normalise_unicode

from carme.translation.markup import with_message

PREFIX = "/jupyter/hub/api/"


class FakeHub:
    """A hub.

    `starts` says how it answers the next starts: `ready`, `pending`, `refuse` or `silent`; `stops` how it
    answers a stop: `fast` or `slow`.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.starts = "ready"
        self.stops = "fast"
        self.refusal = "There is no image 'x'."
        self.users: set[str] = set()
        self.servers: dict[tuple[str, str], dict[str, Any]] = {}
        self.failures: dict[tuple[str, str], str] = {}
        self.calls: list[tuple[str, str, Any]] = []
        self.down = False

    def set(self, user: str, name: str, **model: Any) -> None:
        """What the hub says about a server from now on."""
        model = {"name": name, "pending": None, "ready": False, "stopped": False} | model
        self.servers[user, name] = model

    def fail(self, user: str, name: str, message: str) -> None:
        """The start of a server fails."""
        self.set(user, name, stopped=True)
        self.failures[user, name] = message

    def called(self, method: str) -> list[Any]:
        """The paths and bodies of all calls of one method."""
        return [(path, body) for kind, path, body in self.calls if kind == method]

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, [unquote(part) for part in path.split("/")]:
            case _ if self.down:
                return 503, None
            case "POST", ["users", user]:
                if user in self.users:
                    return 409, {"message": "exists"}
                self.users.add(user)
                return 201, {"name": user}
            case "DELETE", ["carme", "logins", user]:
                return (204, "") if user in self.users else (404, {"message": "no user"})
            case _, ["users", user, "servers", *_] if user not in self.users:
                return 404, {"message": "Not Found"}
            case "GET", ["users", user, "servers", name]:
                found = self.servers.get((user, name))
                return (200, found) if found else (404, {"message": "Not Found"})
            case "GET", ["users", user, "servers", name, "progress"]:
                message = self.failures.get((user, name))
                if message is None:
                    return 400, {"message": "is not starting..."}
                event = {"progress": 100, "failed": True, "message": f"Spawn failed: {message}"}
                event["html_message"] = with_message(message)
                return 200, f"\n\ndata: {json.dumps(event)}\n\n"
            case "POST", ["users", user, "servers", name]:
                shown = normalise_unicode(body["display_name"])
                if not (is_valid_safe_slug(name) and is_valid_display_name(shown)):
                    return 400, {"status": 400, "message": f"Invalid server_name or display_name: {shown}"}
                if self.starts == "refuse":
                    return 400, {"status": 400, "message": self.refusal}
                if self.starts == "silent":
                    raise ConnectionAbortedError
                ready = self.starts == "ready"
                self.set(user, name, ready=ready, pending=None if ready else "spawn")
                return (201 if ready else 202), ""
            case "DELETE", ["users", user, "servers", name] if (
                self.stops == "slow" and (user, name) in self.servers
            ):
                return 202, ""
            case "DELETE", ["users", user, "servers", name]:
                found = self.servers.pop((user, name), None)
                return (204, "") if found else (404, {"message": "no server"})
        raise AssertionError(f"the portal must not call {method} {path}")

    def __enter__(self) -> "FakeHub":
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                text = self.rfile.read(length)
                path = self.path.removeprefix(PREFIX)
                assert path != self.path, self.path
                body = json.loads(text) if text else None
                fake.calls.append((self.command, path, body))
                if self.headers["Authorization"] != f"token {fake.token}":
                    status, answer = 403, {"status": 403, "message": "Missing or invalid credentials."}
                else:
                    try:
                        status, answer = fake.answer(self.command, path, body)
                    except ConnectionAbortedError:
                        self.close_connection = True
                        return
                data = answer if isinstance(answer, str) else json.dumps(answer)
                if status == 503:
                    data = "<h1>503 Service Unavailable</h1>"
                self.send_response(status)
                self.send_header("Content-Length", "0" if status == 204 else str(len(data.encode())))
                self.end_headers()
                if status != 204:
                    self.wfile.write(data.encode())

            do_GET = do_POST = do_DELETE = _handle

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
