"""Joins, and says which congestion control its connections to other ranks have."""

import contextlib
import os
import socket
from pathlib import Path

from carme_runtime import gaspi

try:
    process = gaspi.init(20)
except gaspi.GaspiError as error:
    print(type(error).__name__, error)
else:
    process.barrier()
    found = set()
    for file in [*Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as opened:
            if opened.type == socket.SOCK_STREAM and opened.getpeername()[0].startswith("127.0.0."):
                algorithm = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                found.add(algorithm.rstrip(b"\0").decode())
    print(*sorted(found))
    process.barrier()
    process.close()
