"""A run in a process of its own, for programs with several threads.

The workers are forked, and a fork copies the locks that other threads hold at that moment.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carme.errors import CarmeError
from carme.translation import message as _

__all__ = ["run", "serve"]

_PR_SET_PDEATHSIG = 1
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from carme.staging.in_subprocess import serve; serve()"
)


def run(function: Callable[..., Any], *arguments: Any, notify: Callable[[Any], None] | None) -> Any:
    """Call a function there.

    Args:
        function: One that a module of `carme` has under its name: that name is what travels.
        arguments: For it.
        notify: Called here with what it reports.

    Raises:
        CarmeError: What the function raised, or the process ended unexpectedly.
    """
    place = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _PROGRAM, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin as request:
            pickle.dump((function, arguments, notify is not None, os.getpid()), request)
        while True:
            kind, value = pickle.load(process.stdout)
            if kind == "report":
                assert notify is not None
                notify(value)
            elif kind == "error":
                raise value
            else:
                return value
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        raise CarmeError(
            _("The process that copies ended unexpectedly (exit code {code}).", code=process.wait()),
            _("Run the same again; it goes on from here."),
        ) from None
    finally:
        process.stdout.close()
        process.kill()
        process.wait()


def serve() -> None:
    """The other side: one request, answered with what is reported and then the result."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    function, arguments, wanted, parent = pickle.load(sys.stdin.buffer)
    if os.getppid() != parent:
        os._exit(1)
    output = sys.stdout.buffer

    def answer(kind: str, value: Any) -> None:
        pickle.dump((kind, value), output)
        output.flush()

    def reported(value: Any) -> None:
        answer("report", value)

    try:
        result = function(*arguments, notify=reported if wanted else None)
    except CarmeError as error:
        answer("error", error)
    else:
        answer("result", result)
