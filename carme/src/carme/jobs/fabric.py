"""The way into a running job, for users who may read its folder: a connection to the agent on its first node.

This is the client's side of the protocol. `carme_runtime.fabric` is the other side, which is not
installed on hosts that start jobs. See docs/developers/interfaces.md.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import ssl
import struct
from pathlib import Path
from typing import Any, Self

from carme.errors import CarmeError
from carme.translation import message as _

PROTOCOL = "carme-fabric-1"
CONNECT_SECONDS = 10.0
FRAME_LIMIT = 16 << 20  # bytes
SEAL_BYTES = 32


class FabricConnection:
    """A client of the job's agents. `nodes`, by node rank, are dictionaries with `number` and `host`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._seals: tuple[_Seal, _Seal] | None = None  # of what goes out and of what comes in
        self.nodes: list[dict[str, Any]] = []

    @classmethod
    async def open(cls, folder: Path) -> Self:
        """Connect to the job whose private folder is `folder`. Raises CarmeError."""
        where, key, context = _read(folder)
        name = f"{where['host']} port {where['port']}"
        remedy = "See whether the job still runs, and whether this host reaches the compute nodes."
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                streams = await asyncio.open_connection(
                    where["host"], where["port"], ssl=context, server_hostname=""
                )
                connection = cls(*streams)
                await connection._prove(key)
                connection._send({"client": True})
                connection.nodes = (await connection._receive())["members"]["present"]
                return connection
        except TimeoutError:
            raise CarmeError(
                _("The job's agent at {name} does not answer.", name=name), remedy, code="agent"
            ) from None
        except (ssl.SSLError, _Stranger, EOFError, ValueError, KeyError):
            raise CarmeError(
                _(
                    "What listens at {name} is not this job's agent, or does not know this job's key.",
                    name=name,
                ),
                remedy,
                code="agent",
            ) from None
        except OSError as error:
            raise CarmeError(
                _(
                    "The job's agent at {name} does not answer: {why}.",
                    name=name,
                    why=error.strerror or error,
                ),
                remedy,
                code="agent",
            ) from None

    def send(self, node: int, request: dict[str, Any]) -> None:
        """Ask something of the node with this number."""
        self._send({"node": node, "request": request})

    async def next_event(self) -> dict[str, Any]:
        """What a node answers; {} when a node has come or gone. Raises CarmeError when the agent is lost."""
        try:
            message = await self._receive()
        except (OSError, EOFError, ValueError, _Stranger):
            raise CarmeError(
                _("The connection to the job was lost."),
                _("See whether it still runs: carme jobs"),
                code="agent",
            ) from None
        if "members" in message:
            self.nodes = message["members"]["present"]
        return message.get("event", {})

    def close(self) -> None:
        """Hang up: processes that were started through this connection have to end."""
        self._writer.transport.abort()

    async def _prove(self, key: bytes) -> None:
        own_challenge = secrets.token_bytes(32)
        self._send({"protocol": PROTOCOL, "challenge": own_challenge.hex()})
        answer = await self._receive()
        challenges = own_challenge + bytes.fromhex(answer["challenge"])

        def proof(role: str) -> bytes:
            return hmac.digest(key, f"{PROTOCOL}\0{role}\0".encode() + challenges, hashlib.sha256)

        if not hmac.compare_digest(bytes.fromhex(answer["proof"]), proof("first")):
            raise _Stranger
        self._send({"proof": proof("joining").hex()})
        self._seals = (_Seal(proof("from joining")), _Seal(proof("from first")))

    def _send(self, message: dict[str, Any]) -> None:
        content = json.dumps(message, separators=(",", ":")).encode("ascii")
        if self._seals:
            content = self._seals[0].of(content) + content
        self._writer.write(struct.pack("!I", len(content)) + content)

    async def _receive(self) -> dict[str, Any]:
        (length,) = struct.unpack("!I", await self._reader.readexactly(4))
        if length > FRAME_LIMIT:
            raise _Stranger
        content = await self._reader.readexactly(length)
        if self._seals:
            seal, content = content[:SEAL_BYTES], content[SEAL_BYTES:]
            if not hmac.compare_digest(seal, self._seals[1].of(content)):
                raise _Stranger
        return json.loads(content)


class _Stranger(Exception):
    """The peer is not the job's agent."""


class _Seal:
    """The MACs of the frames of one direction, over their position and content."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def of(self, content: bytes) -> bytes:
        """The seal of the next frame."""
        seal = hmac.digest(self._key, struct.pack("!Q", self._count) + content, hashlib.sha256)
        self._count += 1
        return seal


def _read(folder: Path) -> tuple[dict[str, Any], bytes, ssl.SSLContext]:
    certificate = folder / "fabric.pem"
    try:
        message = json.loads((folder / "fabric.json").read_bytes())
        where = {"host": str(message["host"]), "port": int(message["port"])}
        key = (folder / "fabric.key").read_bytes().strip()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # all nodes of the job show the same certificate, and nobody else does
        context.load_cert_chain(certificate)
        context.load_verify_locations(certificate)
    except (OSError, ValueError, KeyError, TypeError) as error:
        system = isinstance(error, OSError)
        what = f"{error.filename or certificate}: {error.strerror}" if system else "a file is damaged"
        raise CarmeError(
            _("Carme cannot find the address of the job's agent ({what}).", what=what),
            _("Wait until the job's first program runs. You cannot open a shell in a job without an image."),
            code="agent",
        ) from None
    return where, key, context
