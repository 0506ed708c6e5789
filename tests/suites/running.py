"""Commands: run, shown, saved, ended after a limit or with this program, and noted for the report."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = [
    "ROOT",
    "Output",
    "Runner",
    "Stop",
    "call",
    "copy_to_output",
    "end",
    "finish_end",
    "path_of",
    "report",
    "request_end_of_group",
    "show_stage",
]

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a process has to end by itself before it is killed.
LAST_SECONDS = 10
#: The same where it was interrupted: tests on the cluster end what they have started there.
INTERRUPTED_SECONDS = 120
#: Exit codes of programs that were stopped after a limit, as of timeout(1), or that cannot be started.
STOPPED, NOT_STARTED = 124, 127


class Stop(Exception):
    """No suite can run, or no more; `code` is the exit code: 2 for a wrong call or what is missing."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def report(message: str) -> None:
    """A line on standard error."""
    sys.stdout.flush()
    print(f"test: {message}", file=sys.stderr, flush=True)


def show_stage(title: str) -> None:
    """A heading with the time of day."""
    print(f"\n== {title} ({time.strftime('%H:%M:%S')})", flush=True)


def copy_to_output(file: Path) -> None:
    """Print what a file has, whatever its bytes."""
    sys.stdout.flush()
    with file.open("rb") as content, contextlib.suppress(BrokenPipeError):
        while part := content.read(1 << 16):
            _write_all(sys.stdout.fileno(), part)


def path_of(*folders: str) -> dict[str, str]:
    """The environment in which Python imports from these folders of the tree."""
    return {"PYTHONPATH": ":".join(str(ROOT / folder) for folder in folders)}


def call(
    *command: str | Path,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    limit: float | None = None,
    output: int | None = None,
    quiet: bool = False,
) -> int:
    """Run a command and wait for its end; its exit code, as a shell counts it.

    Args:
        command: The program and its arguments.
        environment: Variables besides our own.
        folder: Where it runs.
        limit: After so many seconds it is ended, with exit code 124.
        output: A descriptor that gets what it prints, and our messages; None: our own output.
        quiet: Only what it prints as errors is wanted.
    """
    words = [os.fspath(word) for word in command]
    try:
        process = subprocess.Popen(
            words,
            env=os.environ | (environment or {}),
            cwd=folder,
            stdout=subprocess.DEVNULL if quiet else output,
            stderr=output,
        )
    except OSError as error:
        _report_to(f"{words[0]} cannot be started: {error.strerror}.", output)
        return NOT_STARTED
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        end(process)
        _report_to(f"It was stopped after {limit:.0f} s: {words[0]}", output)
        return STOPPED
    except KeyboardInterrupt:
        # The terminal has interrupted it, too: it may clean up, until the next interrupt.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_SECONDS)
        raise
    finally:
        end(process)
    return code if code >= 0 else 128 - code


def _report_to(message: str, output: int | None) -> None:
    """Write a line to a command's output; None: to standard error."""
    if output is None:
        report(message)
    else:
        _write_all(output, f"test: {message}\n".encode())


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not ended; kill it after LAST_SECONDS."""
    if process.poll() is None:
        process.terminate()
        finish_end(process, LAST_SECONDS)


def request_end_of_group(process: subprocess.Popen[bytes]) -> None:
    """Request the end of a process and its group, which it leads; its parent has not waited for it yet."""
    if process.returncode is None:  # so the number is still that of its group
        os.killpg(process.pid, signal.SIGTERM)


def finish_end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for the end of a process that was let know; kill it after so many seconds."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Output:
    """Where the commands of a suite print; on a terminal directly, else shown and saved.

    Args:
        file: Gets a copy of what is printed, where this program does not print to a terminal.
    """

    def __init__(self, file: Path) -> None:
        self._writing: int | None = None
        self._file = file
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        sys.stdout.flush()
        if not sys.stdout.isatty():
            reading, self._writing = os.pipe()
            saved = self._file.open("wb", buffering=0)
            self._thread = threading.Thread(target=_copy, args=(reading, saved), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writing is not None and self._thread is not None:
            os.close(self._writing)
            # Not for ever: what a command has left running may hold its output open.
            self._thread.join(LAST_SECONDS)

    def call(
        self,
        *command: str | Path,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        limit: float | None = None,
        quiet: bool = False,
    ) -> int:
        """Run a command that prints here; see `call` of this module."""
        output = self._writing
        return call(*command, environment=environment, folder=folder, limit=limit, output=output, quiet=quiet)

    def report(self, message: str) -> None:
        """Write a line to this output; to standard error if the output is a terminal."""
        _report_to(message, self._writing)

    def write(self, text: bytes) -> None:
        """Print bytes here."""
        _write_all(sys.stdout.fileno() if self._writing is None else self._writing, text)


def _copy(reading: int, saved: io.FileIO) -> None:
    """Show the output and save it; if its reader has gone, only save it."""
    is_shown = True
    with saved, os.fdopen(reading, "rb", buffering=0) as source:
        while part := source.read(1 << 16):
            saved.write(part)
            if is_shown:
                try:
                    _write_all(sys.stdout.fileno(), part)
                except BrokenPipeError:
                    is_shown = False


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@dataclass
class Runner:
    """Runs suites and notes how they ended.

    Attributes:
        results: The folder of their results; see `tests/results.py`.
        failed: The names of those that failed.
    """

    results: Path
    failed: list[str] = field(default_factory=list)

    def run(
        self,
        name: str,
        *command: str | Path,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> None:
        """Run one command as a suite, or a part of one, of this name."""
        self.run_steps(name, lambda output: output.call(*command, environment=environment, folder=folder))

    def run_steps(self, name: str, steps: Callable[[Output], int]) -> None:
        """Run several commands as one suite.

        Args:
            name: The suite, or the part of one.
            steps: Runs the commands on the output that it gets, and returns the exit code.
        """
        show_stage(name)
        began, file = time.monotonic(), self.file_of(name)
        with Output(self.results / f"{file}.txt") as output:
            code = steps(output)
        if code:
            self.failed.append(name)
        seconds = int(time.monotonic() - began)
        print(f"-- {name} took {seconds} s", flush=True)
        with (self.results / "suites").open("a") as listed:
            listed.write(f"{name}\t{seconds}\t{code}\t{file}\n")

    def junit(self, name: str) -> str:
        """The option of pytest that saves the results of this suite."""
        return f"--junitxml={self.results / self.file_of(name)}.xml"

    @staticmethod
    def file_of(name: str) -> str:
        """The name of a suite's files, without an ending."""
        return re.sub(r"[^0-9A-Za-z]", "-", name)
