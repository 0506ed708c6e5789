"""How two ranks prove to each other that they hold the job's key (see `carme_runtime.key`).

The proofs cover what the connecting side says about itself, too.
"""

import hmac
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable

from carme_runtime.collectives.errors import PeerLost, WrongKey
from carme_runtime.key import proof
from carme_runtime.logs import log

PROTOCOL = "carme-runtime-1"

MAGIC = b"CARMERT1" + (b"<" if sys.byteorder == "little" else b">")
IDENTITY = struct.Struct("!II")  # rank and stream of the connecting side
ONE_PEER_SECONDS = 5.0  # that a connection has to prove itself


class NotAPeer(Exception):
    """The peer speaks something else. The text says what, after "it"."""


class Refusals:
    """Logs who was not let in at a door, and why."""

    MOST = 20  # a port scan must not fill the log

    def __init__(self) -> None:
        self._count = 0
        self.over = False  # the door is closed: who still is in it gets no answer

    def report(self, where: str, error: BaseException) -> None:
        """Who connected from `where` was refused because of `error`, which `admit` raised."""
        self._count += 1
        if self.over or self._count > self.MOST:
            return
        if isinstance(error, WrongKey):
            reason = "it does not hold the key of this job"
        elif isinstance(error, TimeoutError):
            reason = "it did not prove in time that it holds the key of this job"
        elif isinstance(error, NotAPeer):
            reason = f"it {error}"
        elif isinstance(error, OSError):
            reason = f"it is gone ({error.strerror or error})"
        else:
            reason = "it does not say what ranks say"
        more = " Further ones are not reported." if self._count == self.MOST else ""
        log.warning("A connection from %s was refused: %s.%s", where, reason, more)


def enter(
    reach: Callable[[], socket.socket], key: bytes, rank: int, stream: int, deadline: float
) -> socket.socket:
    """Connect by `reach`, and greet.

    The accepting side waits for nobody longer than ONE_PEER_SECONDS. Who was given up so, as a rank is that
    gets no processor, comes again. Raises what `reach` and `greet` raise.
    """
    while True:
        began = time.monotonic()
        connection = reach()
        try:
            greet(connection, key, rank, stream, deadline)
            return connection
        except BaseException as error:
            connection.close()
            now = time.monotonic()
            if not isinstance(error, PeerLost) or now - began < ONE_PEER_SECONDS or now >= deadline:
                raise


def greet(connection: socket.socket, key: bytes, rank: int, stream: int, deadline: float) -> None:
    """The connecting side. Raises WrongKey or PeerLost."""
    own_challenge = secrets.token_bytes(32)
    identity = IDENTITY.pack(rank, stream)
    try:
        connection.settimeout(_left(deadline))
        connection.sendall(MAGIC + own_challenge + identity)
        peer_challenge = receive(connection, 32, deadline)
        answer = receive(connection, 32, deadline)
        if not hmac.compare_digest(
            answer, proof(key, PROTOCOL, "accepting", own_challenge + peer_challenge + identity)
        ):
            raise WrongKey(
                "The rank that answered does not hold the key of this job.",
                "Give all ranks the same key file, and see that the port is this job's own.",
            )
        connection.sendall(proof(key, PROTOCOL, "connecting", own_challenge + peer_challenge + identity))
        receive(connection, 1, deadline)
    except (OSError, NotAPeer):
        raise PeerLost(
            "A rank ended the connection before it knew this one, or holds another key.",
            "See what it says, and give all ranks the same key file.",
        ) from None


def admit(connection: socket.socket, key: bytes, deadline: float) -> tuple[int, int]:
    """The accepting side. Returns the other's rank and stream. Raises WrongKey, NotAPeer or OSError."""
    hello = receive(connection, len(MAGIC), deadline)
    if hello != MAGIC:
        raise NotAPeer("speaks another protocol")
    peer_challenge = receive(connection, 32, deadline)
    identity = receive(connection, IDENTITY.size, deadline)
    own_challenge = secrets.token_bytes(32)
    try:
        connection.sendall(
            own_challenge + proof(key, PROTOCOL, "accepting", peer_challenge + own_challenge + identity)
        )
        answer = receive(connection, 32, deadline)
    except (NotAPeer, ConnectionError):
        # So do ranks of other jobs, to whom this side has proved the wrong thing.
        raise NotAPeer("went away instead of proving that it holds the key of this job") from None
    if not hmac.compare_digest(
        answer, proof(key, PROTOCOL, "connecting", peer_challenge + own_challenge + identity)
    ):
        raise WrongKey(
            "A connecting rank does not hold the key of this job.", "Use one key file for all ranks."
        )
    connection.sendall(b"+")
    rank, stream = IDENTITY.unpack(identity)
    return rank, stream


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes before `deadline` (time.monotonic). Raises NotAPeer or OSError."""
    parts = bytearray()
    while len(parts) < size:
        connection.settimeout(_left(deadline))
        part = connection.recv(size - len(parts))
        if not part:
            raise NotAPeer("ended the connection before it had sent its rank and proof")
        parts += part
    return bytes(parts)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
