"""Ports for servers that tests start."""

import itertools
import os
import socket

# Below what the kernel gives to outgoing connections, or one of those may take a port before the server does;
# and each of pytest's workers has its own.
_FIRST, _EACH = 20_000, 1_000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
_numbers = itertools.cycle(range(_FIRST + _worker * _EACH, _FIRST + (_worker + 1) * _EACH))


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, and which is given to nobody else soon."""
    for port in itertools.islice(_numbers, _EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"No port is free from {_FIRST + _worker * _EACH} on.")
