"""Whether the other ranks are there: connections beside GPI-2's, which the system closes with their process.

GPI-2 itself is of no use for that: gaspi_proc_ping waits without limit for the answer of a rank that is
stopped or leaves, and keeps other calls waiting meanwhile.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from carme_runtime.collectives.errors import PeerLost, Timeout
from carme_runtime.gaspi.gpi2.mail import Mail
from carme_runtime.gaspi.handshake import ONE_PEER_SECONDS, NotAPeer, receive
from carme_runtime.gaspi.rendezvous import process_space

KEY = 2  # of the messages by which ranks find each other here
_HELLO = struct.Struct("!I32s")  # rank and secret of the connecting side
# A host that vanished is noticed after half a minute.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Health:
    """Connections to all other ranks. Nothing is sent over them.

    Args:
        rank: This one.
        hosts: By rank, where it runs.
        mail: Messages between the ranks.
        deadline: When all must be connected, by `time.monotonic`.

    Raises:
        Timeout: Not all ranks came in time.
        PeerLost: A rank cannot be reached.
    """

    def __init__(self, rank: int, hosts: Sequence[str], mail: Mail, deadline: float) -> None:
        self._rank, self._hosts = rank, hosts
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._connections: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}  # file descriptors, of those that run where this process does
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._lost: set[int] = set()
        _OF_THIS_PROCESS.add(self)
        try:
            self._connect(mail, deadline)
        except BaseException:
            self.close()
            raise

    def lost(self) -> set[int]:
        """The ranks that have left or ended."""
        with self._lock:
            return set(self._poll_peers())

    def kill(self, rank: int) -> bool:
        """End a rank at once, if it runs where this process can do so; whether it does."""
        with self._lock:
            process = self._processes.get(rank)
            if process is None:
                return False
            try:
                if rank not in self._poll_peers():
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except (AttributeError, OSError):  # refused, or Python was built without it
                return False
        return True

    def close(self) -> None:
        """Let the others know that this rank leaves."""
        with self._lock:
            for connection in self._connections.values():
                # Closing is not enough while a child process has a copy.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._let_go()

    def leave_to_parent(self) -> None:
        """In a child process: close the copies, which would hide that this rank has ended."""
        self._lock = threading.Lock()  # a thread that is not here may have held it
        self._let_go()

    def _let_go(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        while self._processes:
            os.close(self._processes.popitem()[1])
        self._poll = select.poll()

    def _poll_peers(self) -> set[int]:
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            self._lost.add(self._ranks[descriptor])
        return self._lost

    def _connect(self, mail: Mail, deadline: float) -> None:
        secret = secrets.token_hex(16)
        peers = [rank for rank in range(len(self._hosts)) if rank != self._rank]
        with socket.create_server(("", 0), backlog=len(self._hosts)) as listener:
            own_entry = {
                "port": listener.getsockname()[1],
                "secret": secret,
                "pid": os.getpid(),
                "processes": process_space(),
            }
            for peer in peers:
                mail.post(peer, KEY, [json.dumps(own_entry).encode()])
            entries: dict[int, dict[str, Any]] = {}
            for peer in peers:
                message = mail.take(peer, KEY, deadline)
                if message is None:
                    raise _late()
                entries[peer] = json.loads(message)
            for peer in range(self._rank):
                self._add(peer, self._reach(peer, entries[peer]["port"], secret, deadline))
            arrivals = self._arrivals(listener, entries, deadline)
            while len(self._connections) < len(peers):
                self._add(*next(arrivals))
        for peer, entry in entries.items():
            if entry["processes"] == own_entry["processes"]:
                self._watch(peer, entry["pid"])

    def _reach(self, peer: int, port: int, secret: str, deadline: float) -> socket.socket:
        try:
            # As GPI-2 does: IPv4 alone.
            where = (socket.gethostbyname(self._hosts[peer]), port)
            connection = socket.create_connection(where, max(deadline - time.monotonic(), 0.001))
            connection.sendall(_HELLO.pack(self._rank, secret.encode()))
        except OSError as error:
            raise PeerLost(
                f"Rank {peer} cannot be reached at {self._hosts[peer]}: {error.strerror or error}.",
                "See whether it still runs, and whether a firewall lies between the nodes.",
            ) from None
        return connection

    def _arrivals(
        self, listener: socket.socket, entries: dict[int, dict[str, Any]], deadline: float
    ) -> Iterator[tuple[int, socket.socket]]:
        """Higher ranks that connect, without unauthenticated peers."""
        while True:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise _late() from None
            try:
                hello = receive(connection, _HELLO.size, min(deadline, time.monotonic() + ONE_PEER_SECONDS))
            except (NotAPeer, OSError):
                connection.close()
                continue
            peer, secret = _HELLO.unpack(hello)
            expected = entries[peer]["secret"] if peer in entries and peer > self._rank else ""
            if peer not in self._connections and hmac.compare_digest(secret, expected.encode()):
                yield peer, connection
            else:
                connection.close()

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connections[peer] = connection
        self._ranks[connection.fileno()] = peer
        self._poll.register(connection, select.POLLRDHUP)

    def _watch(self, peer: int, pid: int) -> None:
        """Notice also by its process when a rank has ended, where the system can tell."""
        # Without it connections are there, and GPI-2 to end a rank.
        with contextlib.suppress(AttributeError, OSError):
            process = os.pidfd_open(pid)
            self._processes[peer], self._ranks[process] = process, peer
            self._poll.register(process, select.POLLIN)


_OF_THIS_PROCESS: weakref.WeakSet[Health] = weakref.WeakSet()


def _close_copies() -> None:
    for health in list(_OF_THIS_PROCESS):
        health.leave_to_parent()


os.register_at_fork(after_in_child=_close_copies)


def _late() -> Timeout:
    return Timeout("Not all ranks joined in time.", "See what the others say.")
