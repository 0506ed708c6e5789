"""Serves the ranges of a node to other nodes, and those of other nodes to the processes there.

One process of each node of a job has a `RangeServer`: the program that runs the net, and `remote` elsewhere.
Bytes go from node to node over TCP. Both ends prove that they have the run's secret, which travels over the
job fabric, before anything else is read. The bytes are not encrypted, as those of training are not.
"""

import contextlib
import json
import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from carme_runtime.fabric.local_socket import is_own_peer
from carme_runtime.petri import forks
from carme_runtime.petri.asking import address
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.range_files import Description
from carme_runtime.petri.store import Store

#: Bytes that are sent at a time.
_PIECE = 16 << 20
#: Seconds: to connect to another node, and between two tries to reach it.
_CONNECTING, _AGAIN = 10.0, 0.1
#: Seconds without a sign of life of the other node, after which a transfer is given up.
_SILENCE = 15
#: Seconds without a byte, after which a copy is tried again: the system of a node that stands still answers.
_STILL = 30
#: An empty message, sent so often, in seconds, while bytes do not come: this node is busy, and does not stand
#: still.
_BEAT, _BEAT_SECONDS = b"", 5.0
#: Seconds without a byte after which this node sends no beats any more: something of it hangs.
_HANGS = 300.0
_TIME = struct.Struct("@ll")  # as the system has it
#: Asks the coordinator a question: (kind, name, what takes the answer). From any thread.
Ask = Callable[[str, str, Callable[[Any], None]], None]


class RangeServer:
    """Serves a node's ranges in threads of its own.

    Args:
        store: Of the node.
        host: The address at which other nodes reach this one.
        secret: Of the run.
        ask: Asks the coordinator.

    Raises:
        PetriError: The address is none of this node's, or another process of the run serves it.
    """

    def __init__(self, store: Store, host: str, secret: bytes, ask: Ask) -> None:
        self._store, self._secret, self._ask_coordinator = store, secret, ask
        self._locks: dict[str, threading.Lock] = {}
        self._local = socket.socket(socket.AF_UNIX)
        try:
            self._local.bind(address(store))
            self._local.listen(128)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._remote = socket.create_server((host, 0), family=family)
        except OSError as error:
            self._local.close()
            raise PetriError(
                f"The ranges of {store.node} cannot be served to other nodes at {host}: {error.strerror}.",
                "Give each node of the job a name and an address of its own.",
            ) from None
        #: Where other nodes get ranges of this one.
        self.where: tuple[str, int] = (host, self._remote.getsockname()[1])
        for server, serve in ((self._remote, self._serve_node), (self._local, self._serve_process)):
            forks.open_descriptors.add(server.fileno())
            threading.Thread(target=self._accept, args=(server, serve), daemon=True).start()

    def close(self) -> None:
        """Serve nobody any more."""
        for server in (self._remote, self._local):
            forks.open_descriptors.discard(server.fileno())
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()

    def pull(self, name: str, copy: int, source: tuple[str, int]) -> bool:
        """Copy a range from another node; False where that did not answer, or has it no more.

        Raises:
            PetriError: There is no room for it.
        """
        with self._locks.setdefault(name, threading.Lock()):
            return self._pull(name, copy, source)

    def _accept(self, server: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client, serve), daemon=True).start()

    @staticmethod
    def _serve(client: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        descriptor = client.fileno()
        forks.open_descriptors.add(descriptor)
        try:
            with contextlib.suppress(OSError, EOFError, AuthenticationError, ValueError):
                serve(client)
        finally:
            forks.open_descriptors.discard(descriptor)
            client.close()

    # To other nodes.

    def _serve_node(self, client: socket.socket) -> None:
        _watch(client)
        with Connection(os.dup(client.fileno())) as connection:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            name = connection.recv_bytes(1000).decode()
            with _beating(connection) as send:
                with self._store.locked():
                    found = self._store.find(name)
                    # Without a lock: a task may delete it meanwhile, and the bytes stay while it is open.
                    file = os.open(found[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) if found else -1
                if not found:
                    send(b"null")
                    return
                try:
                    send(json.dumps(asdict(found[1])).encode())
                    is_shared = found[0].parent == self._store.shared
                    for piece in (_mapped if is_shared else _read)(file, found[1].size):
                        send(piece)
                finally:
                    os.close(file)

    def _pull(self, name: str, copy: int, source: tuple[str, int]) -> bool:
        try:
            with socket.create_connection(source, _CONNECTING) as peer:
                peer.settimeout(None)
                _watch(peer)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(_STILL, 0))
                descriptor = peer.fileno()
                forks.open_descriptors.add(descriptor)
                try:
                    with Connection(os.dup(descriptor)) as connection:
                        return self._receive(connection, name, copy)
                finally:
                    forks.open_descriptors.discard(descriptor)
        except (OSError, EOFError, AuthenticationError):
            return False

    def _receive(self, connection: "Connection[Any, Any]", name: str, copy: int) -> bool:
        answer_challenge(connection, self._secret)
        deliver_challenge(connection, self._secret)
        connection.send_bytes(name.encode())
        while (answer := connection.recv_bytes(1 << 16)) == _BEAT:
            pass
        values = json.loads(answer)
        if values is None:
            return False
        description = Description(**{**values, "shape": tuple(values["shape"])})

        def fill(mapped: mmap.mmap) -> None:
            with memoryview(mapped) as data:
                start = 0
                while start < len(data):
                    start += connection.recv_bytes_into(data, start)  # nothing for a beat

        self._store.receive(replace(description, copy=copy), fill)
        return True

    # To processes of this node.

    def _serve_process(self, client: socket.socket) -> None:
        if not is_own_peer(client):
            return
        with client.makefile("rb") as questions:
            for line in questions:
                kind, _, name = line.decode().strip().partition(" ")
                client.sendall(json.dumps(self._answer(kind, name)).encode() + b"\n")

    def _answer(self, kind: str, name: str) -> Any:
        if kind == "fetch":
            try:
                self._fetch(name)
            except PetriError as error:
                return [error.message, error.remedy]
            return []
        return self._ask(kind, name)

    def _fetch(self, name: str) -> None:
        """Have a range here, if any node has it."""
        with self._locks.setdefault(name, threading.Lock()):
            while self._store.find(name) is None:
                found = self._ask("where", name)
                if found is None:
                    return
                source, copy = found
                if not self._pull(name, copy, source):
                    time.sleep(_AGAIN)  # until the coordinator has seen what happened there
                elif not self._ask("confirm", f"{copy} {name}"):
                    self._store.remove(name)  # a task has changed it meanwhile

    def _ask(self, kind: str, name: str) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ask_coordinator(kind, name, answers.put)
        return answers.get()


@contextlib.contextmanager
def _beating(connection: "Connection[Any, Any]") -> Iterator[Callable[[Any], None]]:
    """What sends a message; a thread that no copy and no lock blocks says that this node lives.

    Not for ever, as a disk or a lock may hang: another node may have the range, too.
    """
    sending, ended = threading.Lock(), threading.Event()
    sent = time.monotonic()

    def send(message: Any) -> None:
        nonlocal sent
        with sending:
            connection.send_bytes(message)
            sent = time.monotonic()

    def beat() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(_BEAT_SECONDS) and time.monotonic() - sent < _HANGS:
                # A message that is on its way says the same.
                if sending.acquire(blocking=False):
                    try:
                        connection.send_bytes(_BEAT)
                    finally:
                        sending.release()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield send
    finally:
        ended.set()
        thread.join()


def _mapped(file: int, size: int) -> Iterator[memoryview]:
    """The bytes of a range in shared memory, without a copy."""
    # Not closed here: what failed to send the bytes has them still. They go with the last who has them.
    with memoryview(mmap.mmap(file, size, access=mmap.ACCESS_READ)) as data:
        for start in range(0, size, _PIECE):
            with data[start : start + _PIECE] as piece:
                yield piece


def _read(file: int, size: int) -> Iterator[memoryview]:
    """The bytes of a range on a disk, which may be slow: they are read before they are sent."""
    buffer = memoryview(bytearray(min(size, _PIECE)))
    for start in range(0, size, _PIECE):
        piece = buffer[: min(_PIECE, size - start)]
        done = 0
        while done < len(piece):
            count = os.preadv(file, [piece[done:]], start + done)
            if not count:
                raise EOFError
            done += count
        yield piece


def _watch(connection: socket.socket) -> None:
    """Let the system end a connection to a node that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE // 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
