"""JupyterHub's REST API, as far as the portal needs it."""

import functools
import json
from enum import Enum
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from carme.config import Settings
from carme.errors import CarmeError
from carme.jobs import SessionOptions
from carme.translation import message
from carme.translation.markup import message_in

__all__ = ["Hub", "HubError", "HubSilent", "HubUnavailable", "Removal", "Server"]

# The hub answers a start within a second or so, whether or not the server is ready by then.
TIMEOUT = httpx.Timeout(15, connect=3)
REMEDY = message("Try again in a moment; if it stays so, tell an administrator.")


class HubError(CarmeError):
    """JupyterHub refused or does not answer."""

    default_code = "hub"


class HubUnavailable(HubError):
    """JupyterHub cannot be reached, so nothing was done."""

    default_code = "hub-unavailable"


class HubSilent(HubError):
    """JupyterHub got the request but gave no answer: it may or may not have acted."""

    default_code = "hub-silent"


class Server(BaseModel, frozen=True):
    """A named server: `pending` is `spawn`, `stop`, `check` or None."""

    pending: str | None = None
    ready: bool = False
    stopped: bool = False


class Removal(Enum):
    """What became of a request to remove a server."""

    UNKNOWN = "unknown"  # there was none
    DONE = "done"
    IN_PROGRESS = "in progress"


@functools.lru_cache(maxsize=2)
def _client(address: str, token: str) -> httpx.Client:
    """One client for the whole process: to make one takes longer than to ask with it."""
    return httpx.Client(
        base_url=address,
        headers={"Authorization": f"token {token}"},
        timeout=TIMEOUT,
        # The hub is on this host; a proxy for the outside world has no business here.
        trust_env=False,
    )


class Hub:
    """The hub of the site. Threads may share it.

    All methods raise `HubError` with the hub's own words, `HubUnavailable` or `HubSilent`.
    """

    def __init__(self, settings: Settings) -> None:
        self._client = _client(
            f"{settings.hub.proxy_url}{settings.hub.base_path}hub/api/", settings.secret("hub-api-token")
        )

    def server(self, user: str, name: str) -> Server | None:
        """The server, also a stopped one; None when the hub has none of that name."""
        response = self._ask("GET", _path(user, name), expected=(404,))
        if response.status_code == 404:
            return None
        try:
            return Server.model_validate(response.json())
        except (ValueError, ValidationError):
            raise HubError(message("JupyterHub's answer cannot be understood."), REMEDY) from None

    def start(self, user: str, name: str, options: SessionOptions, language: str = "") -> None:
        """Start the server, making the hub's user first where needed.

        Args:
            user: Whose it is.
            name: The server's.
            options: What they request.
            language: In which its pages begin, such as "de"; empty: in their own.
        """
        requested = options.model_dump(exclude=None if options.image_file else {"image_file"})
        body = {
            "display_name": options.title or options.image,
            "user_options": requested | ({"language": language} if language else {}),
        }
        response = self._ask("POST", _path(user, name), body, expected=(404,))
        if response.status_code == 404:
            self._ask("POST", f"users/{quote(user, safe='')}", {}, expected=(409,))
            self._ask("POST", _path(user, name), body)

    def failure(self, user: str, name: str) -> str:
        """What the hub says of the last start of a stopped server; empty when it knows of no failure."""
        try:
            with self._client.stream("GET", f"{_path(user, name)}/progress") as response:
                if response.status_code != 200:
                    return ""
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    event = json.loads(line.removeprefix("data:"))
                    if event.get("failed"):
                        found = message_in(str(event.get("html_message", "")))
                        return found or str(event.get("message", "")).removeprefix("Spawn failed: ")
                    if event.get("ready"):
                        break
        except (httpx.HTTPError, ValueError):
            pass  # the caller has other sources for the cause
        return ""

    def remove(self, user: str, name: str) -> Removal:
        """Stop the server and forget it; also right when there is none."""
        response = self._ask("DELETE", _path(user, name), {"remove": True}, expected=(404,))
        return {404: Removal.UNKNOWN, 202: Removal.IN_PROGRESS}.get(response.status_code, Removal.DONE)

    def sign_out(self, user: str, before: float, seconds: float | None = None) -> None:
        """End the user's logins at the hub and at their servers, in every browser.

        `before`: seconds since 1970; logins that are younger stay. `seconds`: how long the hub may take, if
        it is not as long as for the rest.
        """
        path = f"carme/logins/{quote(user, safe='')}"
        limit = TIMEOUT if seconds is None else httpx.Timeout(seconds)
        self._ask("DELETE", path, {"before": before}, expected=(404,), limit=limit)

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        expected: tuple[int, ...] = (),
        limit: httpx.Timeout = TIMEOUT,
    ) -> httpx.Response:
        try:
            response = self._client.request(method, path, json=body, timeout=limit)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise HubUnavailable(message("JupyterHub cannot be reached."), REMEDY) from None
        except httpx.HTTPError:
            raise HubSilent(message("JupyterHub did not answer in time."), REMEDY) from None
        if response.is_success or response.status_code in expected:
            return response
        if why := _message(response):
            if response.status_code == 403:
                raise HubError(
                    message("JupyterHub refused the portal: {why}", why=why),
                    message("Tell an administrator."),
                )
            raise HubError(why)
        if response.status_code in (502, 503, 504):
            raise HubUnavailable(message("JupyterHub is not running."), REMEDY)
        raise HubError(
            message("JupyterHub answered with status {status}.", status=response.status_code), REMEDY
        )


def _path(user: str, name: str) -> str:
    return f"users/{quote(user, safe='')}/servers/{quote(name, safe='')}"


def _message(response: httpx.Response) -> str:
    """The hub's own words; the proxy in front of a stopped hub answers without any."""
    try:
        return str(response.json().get("message") or "")
    except (ValueError, AttributeError):
        return ""
