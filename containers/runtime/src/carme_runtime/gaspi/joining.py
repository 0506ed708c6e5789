"""Makes this process a member of the run: finds the other ranks, maps memory, opens streams between nodes."""

import atexit
import contextlib
import errno
import functools
import os
import random
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carme_runtime.addresses import TURN_LOOPBACK_ON, is_loopback
from carme_runtime.collectives import links
from carme_runtime.collectives.core import load
from carme_runtime.collectives.errors import (
    InvalidCall,
    OutOfResources,
    PeerLost,
    Timeout,
    WrongKey,
)
from carme_runtime.gaspi import handshake
from carme_runtime.gaspi.rendezvous import Entry, Exchange, process_space
from carme_runtime.logs import log
from carme_runtime.transports import GPI2, NATIVE, TRANSPORT, TRANSPORTS

STREAMS = 3  # to a rank on another node: one for one-sided operations, the others for collectives
# TCP's congestion control between ranks. BBR is made for long ways: it sends by timers, which between nodes
# beside each other takes a processor's time and leaves the link idle.
CONGESTION_CONTROL, PACED, UNPACED = "CARME_CONGESTION_CONTROL", "bbr", ("cubic", "reno")
GPI2_PORTS = range(20_000, 32_000)  # below those that systems give to clients


def transport_of(name: str | None) -> str:
    """What carries data: `name`, or what CARME_TRANSPORT says, or native. Raises InvalidCall."""
    source = "transport=" if name else f"{TRANSPORT}="
    name = name or os.environ.get(TRANSPORT) or NATIVE
    if name not in TRANSPORTS:
        raise InvalidCall(f"{source}{name} is not a transport.", f"Choose from {', '.join(TRANSPORTS)}.")
    return name


@contextlib.contextmanager
def _open_files() -> Iterator[None]:
    """Say what to do where the system has no more of them for this process: sockets are files, too."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OutOfResources(
            f"This rank cannot open what it needs to join the others: {error.strerror}.",
            "Allow this process more open files: ulimit -n 4096.",
        ) from None


@_open_files()
def join(
    rank: int,
    size: int,
    exchange: Exchange,
    key: bytes | None,
    address: str | None,
    master: str,
    timeout: float,
    transport: str | None = None,
) -> Any:
    """The transport's context of this rank, connected to all others.

    Args:
        exchange: sends this rank's entry to all ranks, returns all entries by rank.
        key: the job's; None where all ranks run on one host, whose first then makes one.
        address: at which other nodes reach this one; None: what the route to `master` says.
        timeout: seconds for all of it.
        transport: one of TRANSPORTS; None: what CARME_TRANSPORT says, else the native core.
    """
    deadline = time.monotonic() + timeout
    if transport_of(transport) == GPI2:
        return _join_gpi2(rank, size, exchange, address or own_address(master), deadline)
    context = load().Context(rank, size)
    links.apply_file(context)
    address = address or own_address(master)
    listener = socket.create_server((address, 0), family=_family(address), backlog=1024)
    try:
        entries = exchange(
            {
                "pid": os.getpid(),
                "control": context.control_fd,
                "node": node_name(address),
                "address": address,
                "port": listener.getsockname()[1],
                "key": secrets.token_hex(32) if key is None and rank == 0 else None,
            }
        )
        if any("control" not in entry for entry in entries):
            raise InvalidCall(
                "Some ranks chose the transport native, and others did not.",
                f"Set {TRANSPORT} alike on all ranks.",
            )
        key = key or bytes.fromhex(entries[0]["key"])
        names = [entry["node"] for entry in entries]
        nodes = [names.index(name) for name in names]
        # One stream within the node, for messages between two ranks: the rest goes through shared memory.
        counts = {r: 1 if nodes[r] == nodes[rank] else STREAMS for r in range(size) if r != rank}
        streams = _connect_all(listener, entries, rank, counts, key, deadline)
    finally:
        listener.close()  # from here on nobody can even knock
    _close_at_exit(context)
    context.connect(
        [(entries[r]["pid"], entries[r]["control"], nodes[r], streams.get(r, [])) for r in range(size)]
    )
    local_size = nodes.count(nodes[rank])
    log.info("Rank %d of %d has joined over %s, one of %d on its node.", rank, size, NATIVE, local_size)
    return context


def _join_gpi2(rank: int, size: int, exchange: Exchange, address: str, deadline: float) -> Any:
    from carme_runtime.gaspi.gpi2.context import start
    from carme_runtime.gaspi.gpi2.library import Library

    library = Library()  # who lacks it is to say so before the others wait for it
    entries = exchange({"address": address, "port": random.choice(GPI2_PORTS), "transport": GPI2})
    if any(entry.get("transport") != GPI2 for entry in entries):
        raise InvalidCall(
            "Some ranks chose the transport gpi2, and others did not.", f"Set {TRANSPORT} alike on all ranks."
        )
    hosts = [entry["address"] for entry in entries]
    context = start(library, rank, size, hosts, entries[0]["port"], deadline - time.monotonic())
    _close_at_exit(context)
    log.info("Rank %d of %d has joined over %s.", rank, size, GPI2)
    return context


def join_started_by_gaspi_run(timeout: float) -> Any:
    """The context of a rank that a launcher of GPI-2 has started: GPI-2 itself knows the others."""
    from carme_runtime.gaspi.gpi2.context import start
    from carme_runtime.gaspi.gpi2.library import Library

    context = start(Library(), None, None, None, None, timeout)
    _close_at_exit(context)
    return context


def _close_at_exit(context: Any) -> None:
    """Its threads end before the interpreter does, no matter who still holds it then."""
    reference = weakref.ref(context)
    atexit.register(lambda: (held := reference()) and held.close())


def own_address(master: str) -> str:
    """The address of this host from which it reaches `master`."""
    if is_loopback(master):
        return "127.0.0.1"
    family, kind, protocol, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return probe.getsockname()[0]


def node_name(address: str) -> str:
    """The same for processes that can share memory, another for all others."""
    return f"{process_space()}/{address}"


def _connect_all(
    listener: socket.socket,
    entries: list[Entry],
    rank: int,
    counts: dict[int, int],
    key: bytes,
    deadline: float,
) -> dict[int, list[int]]:
    """Sockets to each rank, as many as `counts` says. The higher rank connects."""
    expected = {(peer, stream) for peer in counts if peer > rank for stream in range(counts[peer])}
    acceptor = _Acceptor(listener, expected, key, deadline)
    found = acceptor.found
    try:
        for peer in counts:
            if peer > rank:
                continue
            for stream in range(counts[peer]):
                reach = functools.partial(_reach, entries[peer], peer, deadline)
                found[peer, stream] = handshake.enter(reach, key, rank, stream, deadline)
        acceptor.wait(rank)
        for connection in found.values():
            _choose_congestion_control(connection)
    except BaseException:
        acceptor.stop()
        for connection in found.values():
            connection.close()
        raise
    finally:
        acceptor.end()
    for connection in found.values():
        connection.settimeout(None)
    return {peer: [found[peer, stream].detach() for stream in range(counts[peer])] for peer in counts}


class _Acceptor:
    """Lets in the ranks that connect to this one, each in a thread of its own, while this one connects.

    Args:
        listener: Where they come.
        expected: Which are awaited: rank and stream.
        key: The job's.
        deadline: When nobody is let in any more, by `time.monotonic`.
    """

    def __init__(
        self, listener: socket.socket, expected: set[tuple[int, int]], key: bytes, deadline: float
    ) -> None:
        self._listener, self._expected = listener, expected
        self._key, self._deadline = key, deadline
        self.found: dict[tuple[int, int], socket.socket] = {}  # the caller's, too
        self._lock, self._changed, self._stopped = threading.Lock(), threading.Event(), threading.Event()
        self._refusals = handshake.Refusals()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        if expected:
            self._thread.start()

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not (self._complete() or time.monotonic() >= self._deadline or self._stopped.is_set()):
            with contextlib.suppress(TimeoutError):
                connection, where = self._listener.accept()
                threading.Thread(target=self._admit, args=(connection, where[0]), daemon=True).start()
        self._changed.set()

    def _complete(self) -> bool:
        return self._expected <= self.found.keys()

    def _admit(self, connection: socket.socket, where: str) -> None:
        try:
            by = min(self._deadline, time.monotonic() + handshake.ONE_PEER_SECONDS)
            peer = handshake.admit(connection, self._key, by)
            with self._lock:
                if peer not in self._expected or peer in self.found:
                    raise handshake.NotAPeer(f"says it is rank {peer[0]}, which is not awaited")
                self.found[peer] = connection
        except (OSError, handshake.NotAPeer, WrongKey) as error:
            self._refusals.report(where, error)
            connection.close()
        self._changed.set()

    def wait(self, rank: int) -> None:
        """Wait until all that are awaited by this `rank` have come.

        Raises:
            Timeout: Some did not until the deadline.
        """
        while not self._complete():
            if time.monotonic() >= self._deadline:
                missing = sorted({peer for peer, _ in self._expected - self.found.keys()})
                raise Timeout(
                    f"Rank {rank} was not reached in time by these ranks: {', '.join(map(str, missing))}.",
                    "See what they say, and whether a firewall lies between the nodes.",
                )
            self._changed.wait(0.05)
            self._changed.clear()

    def stop(self) -> None:
        """Let nobody in any more."""
        self._stopped.set()

    def end(self) -> None:
        """Report no more refusals, and wait for the thread that accepts."""
        self._refusals.over = True
        if self._thread.is_alive():
            self._thread.join(1)


def _reach(entry: Entry, peer: int, deadline: float) -> socket.socket:
    try:
        left = max(deadline - time.monotonic(), 0.001)
        return socket.create_connection((entry["address"], entry["port"]), timeout=min(left, 10))
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        remedy = "See whether it still runs, and whether a firewall lies between the nodes."
        if error.errno == errno.ENETUNREACH and is_loopback(entry["address"]):
            remedy = TURN_LOOPBACK_ON
        raise PeerLost(
            f"Rank {peer} cannot be reached at {entry['address']} port {entry['port']}: "
            f"{error.strerror or error}.",
            remedy,
        ) from None


def _choose_congestion_control(connection: socket.socket) -> None:
    """Take the one that CARME_CONGESTION_CONTROL names, else the system's, unless that is BBR.

    Raises InvalidCall.
    """
    level, option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
    wanted = os.environ.get(CONGESTION_CONTROL)
    if wanted:
        try:
            connection.setsockopt(level, option, wanted.encode())
        except OSError as error:
            allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
            raise InvalidCall(
                f"{CONGESTION_CONTROL}={wanted} cannot be had: {error.strerror}.",
                f"Choose from {', '.join(allowed)}, or leave it out.",
            ) from None
    elif connection.getsockopt(level, option, 16).startswith(PACED.encode()):
        for name in UNPACED:
            with contextlib.suppress(OSError):  # not on this system, or not for everybody
                connection.setsockopt(level, option, name.encode())
                return


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
