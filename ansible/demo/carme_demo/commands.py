"""Running the host's programs: always an argument list, never a shell, and an error that can be read."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import DemoError


def run(
    arguments: Sequence[str],
    *,
    data: bytes | None = None,
    check: bool = True,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    remedy: str = "",
) -> subprocess.CompletedProcess[bytes]:
    """Run a program and wait for it.

    Args:
        arguments: program and arguments.
        data: its standard input; none means empty.
        check: raise when the exit status is not 0.
        timeout: seconds.
        environment: added to the own environment.
        log: file that takes the output instead of the result.
        remedy: the sentence that a failure ends with.

    Raises:
        DemoError: the program is missing, took too long, or (with ``check``) failed.
    """
    name = Path(arguments[0]).name
    sink = None
    try:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = log.open("ab")
        done = subprocess.run(
            list(arguments),
            input=data if data is not None else b"",
            stdout=sink or subprocess.PIPE,
            stderr=sink or subprocess.PIPE,
            timeout=timeout,
            env={**os.environ, **environment} if environment else None,
            check=False,
        )
    except FileNotFoundError:
        raise DemoError(
            f"The program {name} is not installed.", f"Install it with: apt-get install {name}"
        ) from None
    except subprocess.TimeoutExpired:
        raise DemoError(
            f"{' '.join(arguments[:6])} did not end within {timeout:.0f} seconds.", remedy, log=log
        ) from None
    finally:
        if sink is not None:
            sink.close()
    if check and done.returncode != 0:
        message = (done.stderr or done.stdout or b"").decode(errors="replace").strip()
        last = f": {message.splitlines()[-1]}" if message else ""
        raise DemoError(
            f"{' '.join(arguments[:6])} ended with status {done.returncode}{last}".rstrip(".") + ".",
            remedy,
            log=log,
        )
    return done


def text(arguments: Sequence[str], *, check: bool = True, timeout: float | None = None) -> str:
    """Standard output of a program as text, without the last line end."""
    return run(arguments, check=check, timeout=timeout).stdout.decode(errors="replace").rstrip("\n")
