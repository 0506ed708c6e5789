"""Runs programs on a host, one after the other: `tests/host_programs.py` starts it there with this text.

A line of the input is a program, as JSON: its `words`, the text `data` for its standard input, and the
seconds that it has (`timeout`). The answer is a line, too: the exit `code` as `podman exec` reports it, or
none where the time was over, and what it printed (`output`, `errors`), in base64. An empty line is answered
by an empty line.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any


def main() -> None:
    """Report the start, then run the programs of the input until it ends."""
    # What Python itself has added since is not part of a program's environment.
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(environment, **json.loads(line))) if line.strip() else "", flush=True)


def _run(environment: dict[bytes, bytes], words: list[str], data: str, timeout: float) -> dict[str, Any]:
    # Files, not pipes: a process that a program leaves running delays nothing.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = _code(words, environment, data.encode(), output, errors, timeout)
        return {"code": code, "output": _content(output), "errors": _content(errors)}


def _code(
    words: list[str],
    environment: dict[bytes, bytes],
    data: bytes,
    output: IO[bytes],
    errors: IO[bytes],
    timeout: float,
) -> int | None:
    """Run a program; return its exit code, or none if it reached its time limit."""
    try:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        errors.write(f"{words[0]}: {error.strerror}\n".encode())
        return 127 if isinstance(error, FileNotFoundError) else 126
    try:
        process.communicate(data, timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return base64.b64encode(file.read()).decode()


if __name__ == "__main__":
    main()
