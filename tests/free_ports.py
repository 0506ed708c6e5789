"""Ports for servers that tests start."""

import functools
import itertools
import socket
from collections.abc import Iterator

# Below what the kernel gives to outgoing connections, or one of those may take a port before the server does.
_FIRST, _EACH, _RANGES = 20_000, 200, 60


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, and which is given to nobody else soon."""
    for port in itertools.islice(_numbers(), _EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"None of {_EACH} ports is free.")


@functools.cache
def _numbers() -> Iterator[int]:
    """Numbers that no other process that runs tests has, of this run or another, until this one ends."""
    for first in range(_FIRST, _FIRST + _RANGES * _EACH, _EACH):
        mark = socket.socket(socket.AF_UNIX)
        try:
            # unix(7): an abstract name is gone with its process.
            mark.bind(f"\0carme-tests-{first}")
        except OSError:
            mark.close()
            continue
        _marks.append(mark)
        return itertools.cycle(range(first, first + _EACH))
    raise RuntimeError(f"{_RANGES} processes run tests already.")


_marks: list[socket.socket] = []
