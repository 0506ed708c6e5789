"""A Redis server that runs for a test: the system's, or the one that `./test` has unpacked."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis as redis_library

from carme.sandbox.redis import redis_command
from patience import HANG

__all__ = ["Redis", "redis"]


class Redis:
    """A server on the socket `redis.sock` in a folder, which can be ended and started again.

    Args:
        folder: Its path must be short, as those of sockets must.
    """

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.address = f"redis+socket://{self.socket}"
        self._command = redis_command(self.socket)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_installed(self) -> bool:
        """Whether there is a Redis on this computer."""
        return self._command is not None

    def start(self) -> None:
        """Start it; returns when it listens."""
        assert self._command and not self._process
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + HANG
        while not self._listens():
            assert self._process.poll() is None and time.monotonic() < end, "Redis has not started"
            time.sleep(0.01)

    def _listens(self) -> bool:
        # Its socket is there a moment earlier: anyone who connects then is refused.
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def flush(self) -> None:
        """Delete all of its content."""
        with self.client() as client:
            client.flushall()

    def client(self) -> redis_library.Redis:
        """A client of this server."""
        return redis_library.Redis(unix_socket_path=str(self.socket), decode_responses=True)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop its process: it accepts connections and answers nothing."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; its content is lost."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.socket.unlink(missing_ok=True)


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[Redis]:
    """A running server; if Redis is missing, one that does not run."""
    server = Redis(folder)
    if server.is_installed:
        server.start()
    try:
        yield server
    finally:
        server.kill()
