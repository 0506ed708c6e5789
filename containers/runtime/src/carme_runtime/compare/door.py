"""How ranks report to the comparison, and what it asks them for: lines of JSON over TCP.

Both ends prove that they hold the comparison's secret, which ranks get in their environment.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from carme_runtime.key import proof

ADDRESS, SECRET = "CARME_COMPARE_DOOR", "CARME_COMPARE_SECRET"
_LONGEST_LINE = 1 << 22
_GREETING_SECONDS = 10.0


class Lost(Exception):
    """The other end is gone, is silent, or does not hold the secret."""


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")

    def fileno(self) -> int:
        """The connection's descriptor."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Raises Lost."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(str(error)) from None

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Raises Lost, also where nothing comes for so long."""
        self._socket.settimeout(seconds)
        try:
            line = self._file.readline(_LONGEST_LINE)
        except TimeoutError:
            raise Lost(f"no answer for {seconds:.0f} s") from None
        except OSError as error:
            raise Lost(str(error)) from None
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)
        if not line.endswith(b"\n"):
            raise Lost("the connection ended")
        try:
            message = json.loads(line)
        except ValueError:
            raise Lost("no JSON came") from None
        if not isinstance(message, dict):
            raise Lost("no JSON object came")
        return message

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._file.close()
            self._socket.close()


class Door:
    """Where ranks come in."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self._server.settimeout(0.2)
        self._secret = secrets.token_bytes(32)
        port = self._server.getsockname()[1]
        self.environment = {ADDRESS: json.dumps([address, port]), SECRET: self._secret.hex()}

    def admit(self, name: str, ranks: int, seconds: float, alive: Callable[[], bool]) -> list[Line]:
        """The lines of all ranks of a contestant, in their order. Raises Lost."""
        lines: dict[int, Line] = {}
        end = time.monotonic() + seconds
        try:
            while len(lines) < ranks:
                if not alive():
                    raise Lost("it ended")
                if time.monotonic() > end:
                    raise Lost(f"its ranks did not come within {seconds:.0f} s")
                with contextlib.suppress(TimeoutError, Lost):
                    line, rank = self._greet(name)
                    lines.setdefault(rank, line)
        except BaseException:
            for line in lines.values():
                line.close()
            raise
        return [lines[rank] for rank in range(ranks)]

    def _greet(self, name: str) -> tuple[Line, int]:
        connection = self._server.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line, own = Line(connection), secrets.token_hex(32)
        try:
            connection.settimeout(_GREETING_SECONDS)
            line.send(challenge=own)
            answer = line.receive(_GREETING_SECONDS)
            challenges = f"{own} {answer.get('challenge')}".encode()
            if not _holds(answer, proof(self._secret, "compare", "rank", challenges)):
                raise Lost("a stranger")
            line.send(proof=proof(self._secret, "compare", "door", challenges).hex())
            if answer.get("name") != name:
                raise Lost("a rank of another contestant")
            return line, int(answer["rank"])
        except (Lost, KeyError, TypeError, ValueError) as error:
            line.close()
            raise Lost(str(error)) from None

    def close(self) -> None:
        """No more ranks."""
        self._server.close()


def come_in(name: str, rank: int) -> Line:
    """A rank's end. Raises Lost."""
    address, port = json.loads(os.environ[ADDRESS])
    secret = bytes.fromhex(os.environ[SECRET])
    connection = socket.create_connection((address, port), timeout=_GREETING_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line, own = Line(connection), secrets.token_hex(32)
    challenges = f"{line.receive(_GREETING_SECONDS).get('challenge')} {own}".encode()
    line.send(challenge=own, proof=proof(secret, "compare", "rank", challenges).hex(), name=name, rank=rank)
    if not _holds(line.receive(_GREETING_SECONDS), proof(secret, "compare", "door", challenges)):
        raise Lost("what listens there does not hold the secret of this comparison")
    return line


def _holds(message: dict[str, Any], expected: bytes) -> bool:
    return hmac.compare_digest(str(message.get("proof")), expected.hex())
