"""Programs on the demo's hosts at the cost of a fork: a `podman exec` for each host, not for each program.

A `podman exec` takes a quarter of a processor's second, and tests that wait for something run many.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from host_commands import PROGRAMS, checked, run_on

__all__ = ["HostPrograms"]

#: The program for the hosts, passed as text, so that no file of the tests is needed there.
SERVER = ("/usr/bin/python3", "-c", Path(__file__).with_name("host_server.py").read_text())
#: Seconds that a server has to report the end of a program that reached its time limit.
GRACE = 60.0
#: Seconds in which a server that waits for a program answers; where it does not, its host is paused or hangs.
ANSWER = 20.0
#: The result of a program whose host ends; podman reports the same.
HOST_ENDED: dict[str, Any] = {"code": 137, "output": "", "errors": ""}


class _Gone(Exception):
    """The server has ended, with its host or earlier."""


class _Server:
    """`tests/host_server.py` on a host."""

    def __init__(self, command: list[str], environment: Mapping[str, str], timeout: float) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._read = b""
        try:
            self._line(timeout)
        except BaseException:
            self.end()
            raise

    def answers(self) -> bool:
        """Whether it waits for a program; false on a host that is down, paused or hangs."""
        assert self._process.stdin
        try:
            self._process.stdin.write(b"\n")
            return self._line(ANSWER) == b""
        except (_Gone, BrokenPipeError, subprocess.TimeoutExpired):
            return False

    def run(self, words: list[str], data: str, timeout: float) -> dict[str, Any]:
        """Run a program; return its exit code and output.

        Raises:
            subprocess.TimeoutExpired: The server does not answer.
        """
        assert self._process.stdin
        request = json.dumps({"words": words, "data": data, "timeout": timeout}).encode() + b"\n"
        try:
            while request:
                request = request[self._process.stdin.write(request) or 0 :]
            return json.loads(self._line(timeout + GRACE))
        except (_Gone, BrokenPipeError):
            return HOST_ENDED

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout
        source, end = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._read:
            if not select.select([source], [], [], max(0.0, end - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired(self._process.args, timeout)
            part = os.read(source, 1 << 20)
            if not part:
                raise _Gone
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def end(self) -> None:
        """End the server by the end of its input; the program that started it may hang with its host."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class HostPrograms:
    """Runs programs on hosts.

    Args:
        inside: The command line that brings a program to a host, by the host's name and the program's words.
        environment: The environment of that command.
    """

    def __init__(self, inside: Callable[[str, list[str]], list[str]], environment: Mapping[str, str]) -> None:
        self._inside = inside
        self._environment = environment
        self._lock = threading.Lock()
        #: Servers that wait for the next program, by host. Each thread that runs a program has its own.
        self._idle: dict[str, list[_Server]] = {}

    def run(
        self, host: str, words: list[str], *, data: str | None, check: bool, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as root.

        Raises:
            AssertionError: It did not end with 0, and `check` is set.
            subprocess.TimeoutExpired: It did not end in time.
        """
        server = self._server(host, timeout)
        if server is None:
            # The host is down, or not up yet: podman says how.
            command = self._inside(host, words)
            return run_on(
                host, command, environment=self._environment, data=data, check=check, timeout=timeout
            )
        try:
            answer = server.run(words, data or "", timeout)
        except BaseException:
            server.end()
            raise
        with self._lock:
            self._idle[host].append(server)
        output, errors = (_text(answer[name]) for name in ("output", "errors"))
        if answer["code"] is None:
            raise subprocess.TimeoutExpired(words, timeout, output, errors)
        done = subprocess.CompletedProcess(words, answer["code"], output, errors)
        return checked(done, host) if check else done

    def _server(self, host: str, timeout: float) -> _Server | None:
        """A server that waits, or a new one; None if none can be started."""
        while server := self._waiting(host):
            if server.answers():
                return server
            server.end()
        try:
            return _Server(self._inside(host, list(SERVER)), {"PATH": PROGRAMS, **self._environment}, timeout)
        except _Gone:
            return None

    def _waiting(self, host: str) -> _Server | None:
        """Take an unused server."""
        with self._lock:
            idle = self._idle.setdefault(host, [])
            return idle.pop() if idle else None


def _text(printed: str) -> str:
    """The output of a program, with the line ends that Python recognises."""
    return base64.b64decode(printed).decode().replace("\r\n", "\n").replace("\r", "\n")
