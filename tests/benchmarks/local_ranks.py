"""The ranks of a measurement, as processes of this machine with one thread each."""

import os
import socket
import subprocess
from collections.abc import Sequence

__all__ = ["run_local_ranks"]


def run_local_ranks(command: Sequence[str], ranks: int, seconds: float) -> None:
    """Run a program as so many ranks, to their end; none is left running.

    Args:
        command: The program and its arguments.
        ranks: How many.
        seconds: The time that each may take.

    Raises:
        SystemExit: One failed.
        subprocess.TimeoutExpired: One takes longer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": 1}
    begun: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            place = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            begun.append(subprocess.Popen(command, env=environment))
        for process in begun:
            if process.wait(seconds):
                raise SystemExit("A rank failed; see above.")
    finally:
        for process in begun:
            process.kill()
            process.wait()
