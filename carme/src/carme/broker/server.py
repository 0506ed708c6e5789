"""The broker's socket: connections, their limits, and answers."""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from carme.broker import protocol
from carme.broker.answers import pieces
from carme.broker.dispatch import HandOver
from carme.broker.peers import Peer, identify
from carme.broker.service import Broker
from carme.config import Settings
from carme.errors import CarmeError, InvalidRequest, SlurmError
from carme.slurm.lookups import identity_of
from carme.slurm.programs import end
from carme.translation import message as _

_log = logging.getLogger("carme.broker")

CONNECTIONS = 16  # of one ordinary user at a time
CONNECTIONS_OF_SERVICES = 512
BACKLOG = 1024  # connections that wait to be accepted; the kernel refuses those beyond
PROGRAMS, PROGRAMS_OF_ALL = 8, 64  # that have a connection to a user's files, of one user and in all
LINE_SECONDS = 10.0  # for a request to arrive, and for a piece of an answer to be taken


class Server:
    """Listens on the broker's socket; an async context manager."""

    def __init__(self, settings: Settings, broker: Broker, line_seconds: float = LINE_SECONDS) -> None:
        self._settings = settings
        self._broker = broker
        self._line_seconds = line_seconds
        self._open: Counter[int] = Counter()
        self._programs: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._closing = False

    async def __aenter__(self) -> "Server":
        listening = _listen(self._settings.broker.socket)
        self._server = await asyncio.start_unix_server(
            self._connected, sock=listening, limit=protocol.MAXIMUM_LINE, backlog=BACKLOG
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._closing = True
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _remove(self._settings.broker.socket)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing:  # it was accepted before, and nobody would wait for its end
            return writer.transport.abort()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError):
            writer.transport.abort()  # gone, or does not take its answer
        except asyncio.CancelledError:
            writer.transport.abort()  # we are stopping
        except Exception:
            _log.exception("An answer could not be written.")
            writer.transport.abort()  # half an answer is none
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
            # Those beyond the limit get an error, after their request: closing on unread bytes would
            # reset the connection before they read our answer.
            busy = _busy(peer, limit) if self._open[uid] > limit else None
            while line := await self._line(reader, writer):
                answer = busy or await self._answer(peer, line)
                if isinstance(answer, HandOver):
                    return await self._hand_over(writer, answer)
                await self._send(writer, answer)
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
                _("The request ended without a line end."), _("Send one JSON object and a line end.")
            )
        except asyncio.LimitOverrunError:
            error = InvalidRequest(
                _("The request is longer than {maximum_line} bytes.", maximum_line=protocol.MAXIMUM_LINE),
                _("Put large values into a file and name the file."),
            )
        except TimeoutError:
            error = InvalidRequest(
                _("No request arrived within {line_seconds:g} seconds.", line_seconds=self._line_seconds),
                _("Connect again, then send the request."),
            )
        await self._send(writer, protocol.Answer(error=protocol.Failure.of(error)))
        return b""

    async def _answer(self, peer: Peer, line: bytes) -> protocol.Answer | Iterable[bytes] | HandOver:
        """What the peer gets; a result is a whole `protocol.Answer` as JSON already, in pieces."""
        try:
            result = await self._broker.answer(peer, line)
            if isinstance(result, HandOver):
                return self._with_room(result)
            return pieces(result)
        except CarmeError as error:
            return protocol.Answer(error=protocol.Failure.of(error))
        except Exception:
            _log.exception("A request of %s failed.", peer.account.name)
            error = CarmeError(
                _("The broker failed at this request."),
                _("Tell an administrator; its journal has the details."),
                "internal",
            )
            return protocol.Answer(error=protocol.Failure.of(error))

    def _with_room(self, hand_over: HandOver) -> HandOver:
        if self._programs[hand_over.account.uid] >= PROGRAMS or self._programs.total() >= PROGRAMS_OF_ALL:
            raise CarmeError(
                _("Too many files are being read or written at once."),
                _("Try again in a moment."),
                code="busy",
            )
        return hand_over

    async def _hand_over(self, writer: asyncio.StreamWriter, to: HandOver) -> None:
        """Answer, and let a program have the connection; this one ends when that program does."""
        self._programs[to.account.uid] += 1
        # What comes from now on is not for us.
        writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        connection = os.dup(writer.get_extra_info("socket").fileno())
        process = None
        try:
            identity = await identity_of(to.account)
            await self._send(writer, protocol.Answer())
            os.set_blocking(connection, True)
            process = await asyncio.create_subprocess_exec(
                *to.arguments,
                stdin=connection,
                stdout=connection,
                stderr=asyncio.subprocess.DEVNULL,
                env=to.account.environment(),
                cwd="/",
                start_new_session=True,
                umask=0o077,
                **identity,
            )
            writer.transport.abort()  # ours alone; the program has its own
            os.close(connection)
            connection = -1
            await process.wait()
        except SlurmError as error:
            await self._send(writer, protocol.Answer(error=protocol.Failure.of(error)))
        except OSError:
            _log.exception("The files of %s cannot be opened.", to.account.name)
        finally:
            if connection >= 0:
                os.close(connection)
            try:
                if process is not None:
                    await end(process, to.account.uid)
            finally:
                self._programs[to.account.uid] -= 1

    async def _send(self, writer: asyncio.StreamWriter, answer: protocol.Answer | Iterable[bytes]) -> None:
        parts = [answer.model_dump_json().encode()] if isinstance(answer, protocol.Answer) else answer
        for part in parts:
            await self._write(writer, part)  # others are answered before the next one is made
        await self._write(writer, b"\n")

    async def _write(self, writer: asyncio.StreamWriter, part: bytes) -> None:
        writer.write(part)
        async with asyncio.timeout(self._line_seconds):
            await writer.drain()


def _busy(peer: Peer, limit: int) -> protocol.Answer:
    error = CarmeError(
        _(
            "{account_name} has {limit} connections to the broker already; more are not allowed.",
            account_name=peer.account.name,
            limit=limit,
        ),
        _("Close some, or try again in a moment."),
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
