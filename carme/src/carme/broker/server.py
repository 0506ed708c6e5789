"""The broker's socket: connections, their limits, and answers."""

import asyncio
import logging
import socket
from collections import Counter
from pathlib import Path

from pydantic_core import to_jsonable_python

from carme.broker import protocol
from carme.broker.access import Peer, identify
from carme.broker.service import Broker
from carme.config import Settings
from carme.errors import CarmeError, InvalidRequest

_log = logging.getLogger("carme.broker")

CONNECTIONS = 16  # of one ordinary user at a time
CONNECTIONS_OF_SERVICES = 512
BACKLOG = 1024  # connections that wait to be accepted; the kernel refuses those beyond
LINE_SECONDS = 10.0  # for a request to arrive, and for an answer to be taken


class Server:
    """Listens on the broker's socket; an async context manager."""

    def __init__(self, settings: Settings, broker: Broker, line_seconds: float = LINE_SECONDS) -> None:
        self._settings = settings
        self._broker = broker
        self._line_seconds = line_seconds
        self._open: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Server":
        listening = _listen(self._settings.broker.socket)
        self._server = await asyncio.start_unix_server(
            self._connected, sock=listening, limit=protocol.MAXIMUM_LINE, backlog=BACKLOG
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _remove(self._settings.broker.socket)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError):
            writer.transport.abort()  # gone, or does not take its answer
        except asyncio.CancelledError:
            writer.transport.abort()  # we are stopping
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = await identify(writer.get_extra_info("socket"), self._settings)
        except CarmeError as error:
            return await self._send(writer, protocol.Answer(error=protocol.Failure.of(error)))
        uid = peer.account.uid
        limit = CONNECTIONS_OF_SERVICES if peer.trusted else CONNECTIONS
        if self._open[uid] >= 2 * limit:
            return writer.transport.abort()
        self._open[uid] += 1
        try:
            # Those beyond the limit are told so, after they have asked: closing on unread bytes would
            # reset the connection before they read our answer.
            busy = _busy(peer, limit) if self._open[uid] > limit else None
            while line := await self._line(reader, writer):
                await self._send(writer, busy or await self._answer(peer, line))
                if busy:
                    break
        finally:
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]

    async def _line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The next request; empty when the peer is done or has to go."""
        try:
            async with asyncio.timeout(self._line_seconds):
                return await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as rest:
            if not rest.partial:
                return b""
            error = InvalidRequest(
                "The request ended without a line end.", "Send one JSON object and a line end."
            )
        except asyncio.LimitOverrunError:
            error = InvalidRequest(
                f"The request is longer than {protocol.MAXIMUM_LINE} bytes.",
                "Put large values into a file and name the file.",
            )
        except TimeoutError:
            error = InvalidRequest(
                f"No request arrived within {self._line_seconds:g} seconds.", "Connect again to ask."
            )
        await self._send(writer, protocol.Answer(error=protocol.Failure.of(error)))
        return b""

    async def _answer(self, peer: Peer, line: bytes) -> protocol.Answer:
        try:
            return protocol.Answer(result=to_jsonable_python(await self._broker.answer(peer, line)))
        except CarmeError as error:
            return protocol.Answer(error=protocol.Failure.of(error))
        except Exception:
            _log.exception("A request of %s failed.", peer.account.name)
            error = CarmeError(
                "The broker failed at this request.",
                "Tell an administrator; its journal says more.",
                "internal",
            )
            return protocol.Answer(error=protocol.Failure.of(error))

    async def _send(self, writer: asyncio.StreamWriter, answer: protocol.Answer) -> None:
        writer.write(answer.model_dump_json().encode() + b"\n")
        async with asyncio.timeout(self._line_seconds):
            await writer.drain()


def _busy(peer: Peer, limit: int) -> protocol.Answer:
    error = CarmeError(
        f"{peer.account.name} has {limit} connections to the broker already; more are not allowed.",
        "Close some, or try again in a moment.",
        code="busy",
    )
    return protocol.Answer(error=protocol.Failure.of(error))


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(path)  # of a broker that was killed
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    # Everybody may connect: who they are decides what they may ask.
    path.chmod(0o666)
    return listening


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
