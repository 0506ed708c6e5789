"""A JupyterHub, driven through its REST API by a service or an administrator's token."""

import json
import time
from types import TracebackType
from typing import Any

import httpx


class HubApi:
    """One hub. Use as a context manager.

    Args:
        url: Where its proxy answers, with a slash at the end.
        token: May start, read and stop servers.
        certificate: PEM file of the authority to trust; None for plain HTTP.
    """

    def __init__(self, url: str, token: str, certificate: str | None = None) -> None:
        self._http = httpx.Client(
            base_url=f"{url}hub/api/",
            headers={"Authorization": f"token {token}"},
            verify=certificate or True,
            timeout=120,
            trust_env=False,
        )

    def __enter__(self) -> "HubApi":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def add_user(self, user: str) -> None:
        """Let the hub know a user; fine if it does."""
        self._succeeded(self._http.post(f"users/{user}", json={}), 409)

    def remove_user(self, user: str) -> None:
        """Let the hub forget a user, servers and all; fine if it has."""
        self._succeeded(self._http.delete(f"users/{user}"), 404)

    def request(self, user: str, server: str, options: dict[str, Any]) -> bool:
        """Ask for a server; whether it is ready already."""
        reply = self._http.post(f"users/{user}/servers/{server}", json={"user_options": options})
        return self._succeeded(reply).status_code == 201

    def start(self, user: str, server: str, options: dict[str, Any]) -> float:
        """Start a server; seconds from the POST until it is ready.

        Raises:
            RuntimeError: It did not become ready; the hub's words.
        """
        begin = time.perf_counter()
        if self.request(user, server, options):
            return time.perf_counter() - begin
        # The stream reports at once; polling would add half of its interval.
        with self._http.stream("GET", f"users/{user}/servers/{server}/progress") as stream:
            for line in stream.iter_lines():
                event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if event.get("ready"):
                    return time.perf_counter() - begin
                if event.get("failed"):
                    raise RuntimeError(f"{user}/{server} did not start: {event.get('message')}")
        raise RuntimeError(f"{user}/{server} did not start: the hub's progress ended without a result.")

    def stop(self, user: str, server: str, timeout: float = 60) -> None:
        """End a server and wait until the hub has none of that name."""
        end = time.monotonic() + timeout
        while True:
            reply = self._http.request("DELETE", f"users/{user}/servers/{server}", json={"remove": True})
            # While it is being stopped the hub refuses to remove it (400).
            if self._succeeded(reply, 400, 404).status_code == 404:
                return
            if reply.status_code == 204 and server not in self.servers(user):
                return
            if time.monotonic() > end:
                raise RuntimeError(f"{user}/{server} was not stopped within {timeout:.0f} s: {reply.text}")
            time.sleep(0.2)

    def servers(self, user: str) -> dict[str, dict[str, Any]]:
        """The user's servers that are not stopped, by name."""
        reply = self._http.get(f"users/{user}")
        if reply.status_code == 404:
            return {}
        return self._succeeded(reply).json()["servers"]

    def ready(self) -> int:
        """How many servers of all users are ready."""
        return self._count("ready")

    def active(self) -> int:
        """How many servers of all users are starting, ready or stopping."""
        return self._count("active")

    def _count(self, state: str) -> int:
        """Users come in pages; what follows from one is named in it."""
        count, offset = 0, 0
        while True:
            reply = self._http.get(
                "users",
                params={"state": state, "offset": str(offset), "limit": "200"},
                headers={"Accept": "application/jupyterhub-pagination+json"},
            )
            page = self._succeeded(reply).json()
            for user in page["items"]:
                servers = user["servers"].values()
                count += sum(1 for server in servers if state == "active" or server["ready"])
            following = page["_pagination"]["next"]
            if following is None:
                return count
            offset = following["offset"]

    def _succeeded(self, reply: httpx.Response, *also: int) -> httpx.Response:
        if reply.is_success or reply.status_code in also:
            return reply
        raise RuntimeError(
            f"{reply.request.method} {reply.url} answered {reply.status_code}: {reply.text[:300]}"
        )
