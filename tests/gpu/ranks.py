"""Starts the ranks of a program of this folder, and runs a program's checks."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = float(os.environ.get("CARME_GPU_TEST_SECONDS", "240"))  # only catches a hang


def run(program: str, ranks: int, *arguments: str, **variables: str) -> list[str]:
    """Run a program on this host; the outputs of its ranks.

    Args:
        program: Its name in `programs`, without `.py`.
        ranks: How many.
        arguments: Of the program.
        variables: Further ones of the environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "PYTHONPATH": _path()}
    shared |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + SECONDS
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(end - time.monotonic(), 0.1))[0])
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it says where it is
            outputs.append(process.communicate()[0])
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    return outputs


def _path() -> str:
    """Where programs find this module, too."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


class Checks:
    """Runs all checks of a program, whichever fail: a machine with a GPU is rare."""

    def __init__(self) -> None:
        self._known: list[Callable[[], None]] = []

    def __call__(self, check: Callable[[], None]) -> Callable[[], None]:
        """Add one; for use as a decorator."""
        self._known.append(check)
        return check

    def run(self, chosen: str = "") -> int:
        """Run those whose name contains `chosen`. Returns the number of those that failed."""
        failed = 0
        for check in self._known:
            if chosen not in check.__name__:
                continue
            began = time.monotonic()
            try:
                check()
            except Exception:
                failed += 1
                print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
            else:
                print(f"PASSED {check.__name__} in {time.monotonic() - began:.1f} s", flush=True)
        return failed
