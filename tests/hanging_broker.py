"""A broker that accepts connections and answers nothing, until a test has it answer."""

import socket
import threading
from pathlib import Path

__all__ = ["HangingBroker"]


class HangingBroker:
    """Listens on a socket; `close` ends that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()

    def received(self) -> list[bytes]:
        """What came on the connections that wait to be accepted."""
        self._listening.setblocking(False)
        found = []
        while True:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return found
            with connection:
                found.append(connection.recv(4096))

    def answer(self, connections: int, *, slow: bool = False) -> threading.Thread:
        """Serve so many connections: an empty one is closed, a request gets its answer.

        Args:
            slow: Only after an empty connection.
        """

        def serve() -> None:
            waiting, empty = [], not slow
            self._listening.setblocking(True)
            for _ in range(connections):
                connection, _address = self._listening.accept()
                if connection.recv(4096):
                    waiting.append(connection)
                else:
                    empty = True
                    connection.close()
                while empty and waiting:
                    with waiting.pop() as request:
                        request.sendall(b'{"result": []}\n')

        thread = threading.Thread(target=serve)
        thread.start()
        return thread

    def close(self) -> None:
        """Listen no more; the socket's file goes."""
        self._listening.close()
        self.path.unlink()
