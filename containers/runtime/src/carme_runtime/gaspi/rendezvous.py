"""How the ranks of a run find each other: rank 0 collects what each says about itself, and sends it to all.

Over TCP at MASTER_ADDR and MASTER_PORT with the job's key; without a key only among processes of one user on
one host, over a Unix socket whose peers the kernel vouches for.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carme_runtime.addresses import is_loopback
from carme_runtime.collectives.errors import GaspiError, InvalidCall, PeerLost, Timeout, WrongKey
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.gaspi import handshake, launchers
from carme_runtime.key import read_key as read_key_file

Entry = dict[str, Any]
Exchange = Callable[[Entry], list[Entry]]
LENGTH = struct.Struct("!I")
CREDENTIALS = struct.Struct("3i")
LARGEST = 64 * 2**20
UNKNOWN_PEERS = 64  # connections at a time that have not done so


@dataclass(frozen=True)
class Place:
    """This process among the ranks, from the environment that launchers set."""

    rank: int
    size: int
    master: str
    port: int
    key_file: str | None
    address: str | None  # at which other nodes reach this one, where it is not what the route to rank 0 says

    @classmethod
    def from_environment(cls, environment: "os._Environ[str] | dict[str, str]") -> "Place":
        """Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, CARME_KEY_FILE and CARME_ADDRESS.

        Where the first are not set, what MPI's launchers and `srun` set instead: see `launchers`.
        """
        environment = dict(environment) | launchers.translated(environment)
        try:
            rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
            port = int(launchers.meeting_port(environment))
        except ValueError:
            raise InvalidCall(
                "RANK, WORLD_SIZE and MASTER_PORT must be whole numbers.", "Start the program with carme-run."
            ) from None
        if size > 1 and not port:
            raise InvalidCall(
                "MASTER_PORT is not set, so the ranks cannot find each other.",
                "Start the program with carme-run, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
            )
        return cls(
            rank,
            size,
            environment.get("MASTER_ADDR", "127.0.0.1"),
            port,
            environment.get("CARME_KEY_FILE"),
            environment.get("CARME_ADDRESS"),
        )


def process_space() -> str:
    """The same for processes that know each other's numbers, another for all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def read_key(path: str) -> bytes:
    """The key in the file `path` (see `carme_runtime.key`). Raises InvalidCall."""
    try:
        return read_key_file(Path(path))
    except CarmeRuntimeError as error:
        raise InvalidCall(f"CARME_KEY_FILE: {error.message}", error.remedy) from None


def exchange(place: Place, key: bytes | None, entry: Entry, timeout: float) -> list[Entry]:
    """Sends `entry` to all ranks, returns all entries by rank. `timeout` in seconds."""
    if place.size == 1:
        return [entry]
    deadline = time.monotonic() + timeout
    if key is None and not is_loopback(place.master):
        raise InvalidCall(
            "Ranks on several nodes need the job's key, and CARME_KEY_FILE is not set.",
            "Start the program with carme-run, or let CARME_KEY_FILE name a file of 64 random hex digits.",
        )
    return _collect(place, key, entry, deadline) if place.rank == 0 else _report(place, key, entry, deadline)


def _collect(place: Place, key: bytes | None, entry: Entry, deadline: float) -> list[Entry]:
    meeting = _Meeting(place, key, entry, deadline)
    try:
        meeting.wait()
        return meeting.publish()
    finally:
        meeting.close()


class _Meeting:
    """Where rank 0 lets the other ranks in, and collects what each says about itself.

    Args:
        place: Rank 0's.
        key: The job's; None: only processes of this user on this host come in.
        entry: What rank 0 says about itself.
        deadline: When all have to be there, by `time.monotonic`.
    """

    def __init__(self, place: Place, key: bytes | None, entry: Entry, deadline: float) -> None:
        self._place, self._key, self._deadline = place, key, deadline
        self._entries: dict[int, Entry] = {0: entry}
        self._peers: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._unknown = threading.Semaphore(UNKNOWN_PEERS)
        self._refusals = handshake.Refusals()
        self._listener = _listen(place, key, deadline)
        self._listener.setblocking(False)
        self._admitted, self._wake = socket.socketpair()  # a peer that was let in wakes the one who accepts
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._admitted):
            self._selector.register(each, selectors.EVENT_READ)

    def wait(self) -> None:
        """Let ranks in until all are there.

        Raises:
            Timeout: Some were not until the deadline.
        """
        while len(self._entries) < self._place.size:
            left = self._deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(str(r) for r in range(self._place.size) if r not in self._entries)
                raise Timeout(
                    f"These ranks did not join in time: {missing}.", "See what they say, or allow more time."
                )
            ready = {found.fileobj for found, _ in self._selector.select(left)}
            if self._admitted in ready:
                self._admitted.recv(4096)
            if self._listener not in ready or not self._unknown.acquire(timeout=left):
                continue
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:  # gone again
                self._unknown.release()
                continue
            # One who says nothing must not keep others waiting.
            where = str(address[0]) if address else "a process on this host"
            threading.Thread(target=self._admit, args=(connection, where), daemon=True).start()

    def _admit(self, connection: socket.socket, where: str) -> None:
        try:
            if self._key is None:
                rank = _admit_local(connection, self._deadline)
            else:
                by = min(self._deadline, time.monotonic() + handshake.ONE_PEER_SECONDS)
                rank = handshake.admit(connection, self._key, by)[0]
            reported = _receive(connection, self._deadline)  # it is no stranger: it may be slow
            with self._lock:
                if not 0 < rank < self._place.size or rank in self._entries:
                    raise handshake.NotAPeer(f"says it is rank {rank}, which is not awaited")
                if not isinstance(reported, dict):
                    raise handshake.NotAPeer(f"says it is rank {rank}, but not what ranks say")
                self._peers[rank] = connection
                self._entries[rank] = reported
        except (OSError, handshake.NotAPeer, WrongKey, ValueError) as error:
            self._refusals.report(where, error)
            connection.close()  # a port scan, or a rank of another job
        finally:
            self._unknown.release()
            with contextlib.suppress(OSError):
                self._wake.send(b".")

    def publish(self) -> list[Entry]:
        """Send all ranks each one's entry; the entries by rank.

        Raises:
            PeerLost: One has ended meanwhile.
        """
        entries = [self._entries[r] for r in range(self._place.size)]
        for rank, connection in self._peers.items():
            try:
                connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
                _send(connection, entries)
            except OSError:
                raise PeerLost(
                    f"Rank {rank} ended while the ranks joined.", "See what it says, and start the run again."
                ) from None
        return entries

    def close(self) -> None:
        """Let nobody in any more, and let go of those who came."""
        self._refusals.over = True
        with self._lock:
            for each in (self._selector, self._listener, self._admitted, self._wake, *self._peers.values()):
                each.close()


def _report(place: Place, key: bytes | None, entry: Entry, deadline: float) -> list[Entry]:
    def reach() -> socket.socket:
        return _reach(place, key, deadline)

    connection = reach() if key is None else handshake.enter(reach, key, place.rank, 0, deadline)
    with contextlib.closing(connection):
        try:
            if key is None:
                _check_user(connection)
                connection.sendall(LENGTH.pack(place.rank))
            _send(connection, entry)
            return _receive(connection, deadline)
        except (OSError, handshake.NotAPeer, ValueError):
            if time.monotonic() >= deadline:
                raise Timeout("Not all ranks joined in time.", "See what the others say.") from None
            raise PeerLost("Rank 0 ended while the ranks joined.", "See what it says.") from None


def _listen(place: Place, key: bytes | None, deadline: float) -> socket.socket:
    while True:
        try:
            if key is None:
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(_local_name(place))
            else:
                family = socket.getaddrinfo(place.master, place.port, type=socket.SOCK_STREAM)[0][0]
                listener = socket.socket(family)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((place.master, place.port))
            listener.listen(min(place.size, 1024))
            return listener
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise InvalidCall(
                    f"Rank 0 cannot listen at {place.master} port {place.port}: that is another host.",
                    "Set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there.",
                ) from None
            if time.monotonic() >= deadline or key is None:
                raise InvalidCall(
                    f"Rank 0 cannot listen at {place.master} port {place.port}: {error.strerror}.",
                    "Choose another MASTER_PORT.",
                ) from None
            time.sleep(0.1)


def _reach(place: Place, key: bytes | None, deadline: float) -> socket.socket:
    while True:
        try:
            if key is None:
                connection = socket.socket(socket.AF_UNIX)
                try:
                    connection.connect(_local_name(place))
                except OSError:
                    connection.close()
                    raise
                return connection
            return socket.create_connection((place.master, place.port), timeout=1)
        except OSError:
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"Rank 0 was not found at {place.master} port {place.port} in time.",
                    "See whether it runs, and whether MASTER_ADDR and MASTER_PORT are the same on all ranks.",
                ) from None
            time.sleep(0.02)


def _local_name(place: Place) -> str:
    return f"\0carme-runtime-{os.getuid()}-{place.port}"


def _check_user(connection: socket.socket) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    if CREDENTIALS.unpack(raw)[1] != os.getuid():
        raise GaspiError("Another user listens where rank 0 should.", "Choose another MASTER_PORT.")


def _admit_local(connection: socket.socket, deadline: float) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(raw)
    if user != os.getuid():
        raise handshake.NotAPeer(f"is process {process} of user {user}")
    return LENGTH.unpack(handshake.receive(connection, LENGTH.size, deadline))[0]


def _send(connection: socket.socket, content: Any) -> None:
    data = json.dumps(content).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket, deadline: float) -> Any:
    (size,) = LENGTH.unpack(handshake.receive(connection, LENGTH.size, deadline))
    if size > LARGEST:
        raise handshake.NotAPeer(f"has {size} bytes to say")
    return json.loads(handshake.receive(connection, size, deadline))
