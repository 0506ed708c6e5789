"""Messages on a connection: JSON objects, each behind its length, and sealed where a key is known."""

import asyncio
import hashlib
import hmac
import json
import socket
import ssl
import struct
from typing import Any

Message = dict[str, Any]

UNKNOWN_PEER_LIMIT = 4096  # bytes of one frame before the peer has proved that it knows the key
FRAME_LIMIT = 16 * 2**20  # a start message carries a whole environment, which may be some MiB
BACKLOG_LIMIT = 64 * 2**20  # output is bounded by windows: a peer that lets so much pile up does not read
# The kernel notices a peer that is gone without a word after about 30 s, also where a client sends no beats.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
SEAL_BYTES = hashlib.sha256().digest_size


class FrameError(Exception):
    """The peer sent what no agent or client sends."""


class LinkClosed(Exception):
    """The peer closed the connection, or it broke."""


class Link:
    """A connection that carries messages.

    After `seal`, every frame carries a MAC over its position and content, so nothing can be
    changed, dropped, repeated or added on the way.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        self._reader = reader
        self._writer = writer
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0
        self.limit = limit
        self.received_messages = 0

    @classmethod
    async def accept(cls, connection: socket.socket, limit: int, tls: ssl.SSLContext | None) -> "Link":
        """The link over a connection that was accepted, encrypted where there is a `tls`. Raises OSError."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), limit)

    @classmethod
    async def connect(cls, host: str, port: int, limit: int, tls: ssl.SSLContext | None) -> "Link":
        """A link to what listens at `port` of `host`. Raises OSError."""
        name = "" if tls else None  # the certificate names no host
        return cls(*await asyncio.open_connection(host, port, ssl=tls, server_hostname=name), limit)

    def seal(self, *, sending: bytes, receiving: bytes) -> None:
        """From here on seal outgoing frames with `sending`, and demand seals made with `receiving`."""
        self._keys = (sending, receiving)
        self.limit = FRAME_LIMIT

    def send(self, message: Message) -> None:
        """Queue `message`. A connection that is closed, or whose peer never reads, swallows it."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        content = json.dumps(message, separators=(",", ":")).encode("ascii")
        if self._keys:
            content = _seal(self._keys[0], self._sent, content) + content
            self._sent += 1
        self._writer.write(struct.pack("!I", len(content)) + content)
        if transport.get_write_buffer_size() > BACKLOG_LIMIT:
            transport.abort()

    async def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            FrameError: what came is not a frame of this protocol.
            LinkClosed: nothing more will come.
        """
        try:
            (length,) = struct.unpack("!I", await self._reader.readexactly(4))
            if length > self.limit:
                raise FrameError(f"a frame of {length} bytes, where {self.limit} are allowed")
            content = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise LinkClosed("the connection ended within a frame" if error.partial else "closed") from None
        except OSError as error:
            raise LinkClosed(error.strerror or "the connection broke") from None
        if self._keys:
            seal, content = content[:SEAL_BYTES], content[SEAL_BYTES:]
            if not hmac.compare_digest(seal, _seal(self._keys[1], self._received, content)):
                raise FrameError("a frame whose seal does not fit")
            self._received += 1
        self.received_messages += 1
        try:
            message = json.loads(content)
        except (ValueError, RecursionError):
            raise FrameError("a frame that is not JSON") from None
        if not isinstance(message, dict):
            raise FrameError("a frame that is not a JSON object")
        return message

    async def flush(self, seconds: float) -> None:
        """Give what was sent up to `seconds` to leave this process, then close."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), seconds)
        except (OSError, asyncio.TimeoutError):
            self.close()

    def close(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    def descriptor(self) -> int:
        """Of the socket."""
        return self._writer.get_extra_info("socket").fileno()

    def local_address(self) -> str:
        """The address of this host that the peer sees. Raises LinkClosed."""
        name = self._writer.get_extra_info("sockname")
        if not name:  # asyncio knows nothing of a TLS connection any more once the peer has closed it
            raise LinkClosed("closed")
        return name[0]


def _seal(key: bytes, position: int, content: bytes) -> bytes:
    return hmac.new(key, struct.pack("!Q", position) + content, hashlib.sha256).digest()
