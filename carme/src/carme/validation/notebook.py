"""A notebook kernel driven the way a browser drives it: REST to start it, a WebSocket to run cells.

Message format: the Jupyter messaging protocol 5.3 over the server's default (JSON) WebSocket framing,
https://jupyter-client.readthedocs.io/en/stable/messaging.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from carme.errors import CarmeError

#: A server answers the handshake when the kernel has answered it, and itself waits for that so long
#: (`kernel_info_timeout` of jupyter_server); with a cold image on a busy node a kernel is slow to begin.
HANDSHAKE_SECONDS = 65


_T = TypeVar("_T")


class ChannelClosed(CarmeError):
    """The connection to a kernel broke, or was closed, while a cell was to run."""


def description(error: Exception) -> str:
    """An error of a connection in words; many of them carry no text of their own."""
    return f"{type(error).__name__} {error}".strip()


@dataclass
class CellResult:
    """What one cell printed and how it ended."""

    output: str = ""
    error: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.error


class _Channel:
    """A WebSocket for a plain program, in an event loop and a thread of its own; a context manager.

    The library has a client for such programs too. It reads and writes one TLS connection in two threads at
    once, and with Python 3.13.5 such connections hang now and then in their first moments.
    """

    def __init__(self, url: str, headers: dict[str, str], ssl: Any) -> None:
        self._connecting = connect(
            url,
            additional_headers=headers,
            ssl=ssl,
            max_size=None,
            open_timeout=HANDSHAKE_SECONDS,
            # Ranks that keep all processors busy delay the answer to a ping; a cell has its own time limit.
            ping_timeout=None,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="channel", daemon=True)

    def __enter__(self) -> _Channel:
        self._thread.start()
        try:
            self._socket = self._wait(self._connecting.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(self._socket.close())
        finally:
            self._end()

    def send(self, text: str) -> None:
        """Send a message."""
        self._wait(self._socket.send(text))

    def recv(self, timeout: float) -> str | bytes:
        """The next message. Raises TimeoutError after so many seconds."""
        return self._wait(asyncio.wait_for(self._socket.recv(), timeout))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class NotebookKernel:
    """A Python kernel on a running single-user server, as a context manager.

    Arguments: `http` is a client that is already let in by the server (its cookies or its token are used),
    `server_url` the server's address ending with a slash, `ssl` the TLS context for the WebSocket.
    """

    def __init__(self, http: httpx.Client, server_url: str, ssl: Any) -> None:
        self._http = http
        self._server_url = server_url
        self._ssl = ssl
        self._client_session = uuid.uuid4().hex
        self._socket: _Channel | None = None
        self._open = contextlib.ExitStack()
        self._kernel_id = ""

    def __enter__(self) -> NotebookKernel:
        try:
            reply = self._http.post(
                f"{self._server_url}api/kernels", json={"name": "python3"}, headers=self._xsrf_headers()
            )
        except httpx.TransportError as error:
            raise CarmeError(
                f"The notebook server did not answer a kernel's start: {description(error)}.",
                "Look at the log of the user's job.",
            ) from error
        if reply.status_code != 201:
            raise CarmeError(
                f"The notebook server refused to start a kernel: {reply.status_code} {reply.text[:200]}.",
                "Look at the log of the user's job.",
            )
        self._kernel_id = reply.json()["id"]
        self.connect()
        return self

    def connect(self) -> None:
        """Open the channel to the kernel, again after the one before broke; the kernel keeps its state.

        Raises `CarmeError` when the server does not open it.
        """
        self._open.close()
        url = httpx.URL(f"{self._server_url}api/kernels/{self._kernel_id}/channels")
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in self._cookies().items())}
        if "Authorization" in self._http.headers:
            headers["Authorization"] = self._http.headers["Authorization"]
        try:
            self._socket = self._open.enter_context(
                _Channel(
                    str(url.copy_with(scheme="wss" if url.scheme == "https" else "ws")),
                    headers,
                    self._ssl if url.scheme == "https" else None,
                )
            )
        except (OSError, WebSocketException) as error:
            raise CarmeError(
                f"The channel to the kernel was not opened: {description(error)}.",
                "Look at the log of the user's job.",
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        # The server may be gone, or its visitor signed out: then the kernel ends by itself.
        with contextlib.suppress(httpx.TransportError):
            self._http.delete(
                f"{self._server_url}api/kernels/{self._kernel_id}", headers=self._xsrf_headers()
            )

    def run(self, code: str, *, timeout: float, on_line: Callable[[str], None] | None = None) -> CellResult:
        """Run one cell and wait until the kernel is idle again.

        Arguments: `timeout` in seconds for the whole cell; `on_line` gets each complete line as it comes.
        Raises `CarmeError` when the time is over, and `ChannelClosed` when the channel breaks before.
        """
        try:
            return self._run(code, timeout, on_line)
        except WebSocketException as error:
            raise ChannelClosed(f"The channel to the kernel was closed: {description(error)}.") from error

    def _run(self, code: str, timeout: float, on_line: Callable[[str], None] | None) -> CellResult:
        assert self._socket is not None
        message_id = uuid.uuid4().hex
        self._socket.send(
            json.dumps(
                {
                    "channel": "shell",
                    "header": {
                        "msg_id": message_id,
                        "msg_type": "execute_request",
                        "session": self._client_session,
                        "username": "",
                        "version": "5.3",
                    },
                    "parent_header": {},
                    "metadata": {},
                    "content": {"code": code, "silent": False, "store_history": True, "allow_stdin": False},
                }
            )
        )
        result = CellResult()
        end = time.monotonic() + timeout
        pending = ""
        while True:
            try:
                message = json.loads(self._socket.recv(timeout=max(0.0, end - time.monotonic())))
            except TimeoutError:
                raise CarmeError(
                    f"The cell was still running after {timeout:.0f} seconds.",
                    f"It printed: {result.output[-500:]}",
                ) from None
            if message.get("parent_header", {}).get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                result.output += content["text"]
                *complete, pending = (pending + content["text"]).split("\n")
                result.lines += complete
                if on_line:
                    for line in complete:
                        on_line(line)
            elif kind == "execute_result":
                result.output += content["data"].get("text/plain", "")
            elif kind == "error":
                result.error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                if pending:
                    result.lines.append(pending)
                return result

    def _cookies(self) -> dict[str, str]:
        path = httpx.URL(self._server_url).path
        return {
            cookie.name: cookie.value or ""
            for cookie in self._http.cookies.jar
            if path.startswith(cookie.path)
        }

    def _xsrf_headers(self) -> dict[str, str]:
        return {"X-XSRFToken": self._cookies().get("_xsrf", "")}
