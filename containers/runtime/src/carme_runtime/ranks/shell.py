"""A program for a person: on a pseudo-terminal, or with pipes where the person has no terminal."""

import asyncio
import base64
import contextlib
import fcntl
import functools
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from typing import IO, Any

from carme_runtime.ranks import terminal
from carme_runtime.ranks.orphan_cleanup import OrphanCleanup
from carme_runtime.ranks.outputs import Outputs
from carme_runtime.ranks.waiting import call_on_exit

LOGIN_SHELL = ["bash", "-l"]
# What a container's starter leaves there is the prompt of its own shell; this one has the user's or bash's.
PROMPT_VARIABLES = ("PS1", "PROMPT_COMMAND")
HANGUP_GRACE = 5.0  # seconds between SIGHUP and SIGKILL
INPUT_LIMIT = 2**20  # bytes that may wait for a program that does not read


class Shell:
    """Runs what `request` names; requests and events are described in `carme_runtime.ranks.node`.

    Raises OSError when it cannot be started; KeyError, TypeError or ValueError when the request has no sense.
    """

    def __init__(
        self,
        cleanup: OrphanCleanup,
        environment: Mapping[str, str],
        reply: Callable[[dict[str, Any]], None],
        request: dict[str, Any],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._cleanup = cleanup
        self._reply = reply
        self._outputs = Outputs(self._settle)
        self._waiting = bytearray()
        self._input_ended = False
        self._code: int | None = None
        self._grace: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()
        command = [str(word) for word in request["command"]] or LOGIN_SHELL
        variables = {**environment, **request["environment"]}
        for name in PROMPT_VARIABLES:
            variables.pop(name, None)
        cleanup.begin()
        start = _on_terminal if request["size"] else _on_pipes
        self._process, inlet, outlets = start(command, variables, request["size"])
        self._inlet: IO[bytes] | None = inlet
        cleanup.watch(self._process.pid)
        os.set_blocking(inlet.fileno(), False)
        for stream, pipe in outlets.items():
            self._outputs.add(pipe, functools.partial(self._show, stream))
        call_on_exit(self._process.pid, self._ended)

    def take(self, request: dict[str, Any]) -> None:
        """Pass a further request on to the program."""
        kind = request["type"]
        if kind == "input":
            self._take_input(base64.b64decode(request["data"]))
        elif kind == "size" and self._inlet:
            _resize(self._inlet.fileno(), request["size"])
        elif kind == "signal":
            self._signal(signal.Signals(request["signal"]))
        elif kind == "more":
            self._outputs.allow(int(request["bytes"]))

    def stop(self) -> None:
        """Hang up, and kill what does not heed it."""
        if self._grace is None and self._code is None:
            self._grace = self._loop.call_later(HANGUP_GRACE, self._signal, signal.SIGKILL)
            self._signal(signal.SIGHUP)
            self._signal(signal.SIGCONT)  # a stopped one would not hear of it

    def abandon(self) -> None:
        """Nobody is there any more."""
        self._reply = lambda event: None
        self._outputs.abandon()
        self.stop()

    def _take_input(self, data: bytes) -> None:
        if len(self._waiting) + len(data) > INPUT_LIMIT:
            raise ValueError("more input than was requested")
        self._waiting += data
        self._input_ended = not data
        self._pass_input()

    def _pass_input(self) -> None:
        try:
            while self._inlet and self._waiting:
                del self._waiting[: os.write(self._inlet.fileno(), self._waiting)]
        except BlockingIOError:
            assert self._inlet
            self._loop.add_writer(self._inlet.fileno(), self._pass_input)
            return
        except OSError:  # the program does not read any more
            self._input_ended = True
        if self._input_ended:
            self._close_inlet()
        elif self._inlet:
            self._loop.remove_writer(self._inlet.fileno())
        self._waiting.clear()
        self._reply({"type": "taken"})

    def _close_inlet(self) -> None:
        if self._inlet:
            self._loop.remove_writer(self._inlet.fileno())
            self._inlet.close()
            self._inlet = None

    def _signal(self, number: signal.Signals) -> None:
        if self._code is None:  # a zombie at most, so its number cannot belong to somebody else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _show(self, stream: int, data: bytes) -> None:
        if data:
            text = base64.b64encode(data).decode("ascii")
            self._reply({"type": "shown", "stream": stream, "data": text, "bytes": len(data)})

    def _ended(self, code: int) -> None:
        self._code = code
        self._cleanup.forget(self._process.pid)
        self._process.wait()
        self._close_inlet()
        if self._grace:
            self._grace.cancel()
        self._outputs.end_soon()
        self._settle()

    def _settle(self) -> None:
        if self._code is not None and not self._outputs and not self.over.done():
            self._reply({"type": "ended", "code": self._code})
            self.over.set_result(None)


_Started = tuple["subprocess.Popen[bytes]", IO[bytes], dict[int, IO[bytes]]]


def _on_terminal(command: list[str], variables: dict[str, str], size: dict[str, int]) -> _Started:
    master, terminal = os.openpty()
    try:
        _resize(master, size)
        process = _start(command, variables, terminal)
        return process, os.fdopen(os.dup(master), "wb", 0), {1: os.fdopen(master, "rb", 0)}
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(terminal)


def _on_pipes(command: list[str], variables: dict[str, str], _: None) -> _Started:
    process = _start(command, variables, subprocess.PIPE)
    inlet, first, second = process.stdin, process.stdout, process.stderr
    assert inlet and first and second
    return process, inlet, {1: first, 2: second}


def _start(command: list[str], variables: dict[str, str], stream: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", terminal.__file__, *command],
        env=variables,
        stdin=stream,
        stdout=stream,
        stderr=stream,
        bufsize=0,
        start_new_session=True,
    )


def _resize(descriptor: int, size: dict[str, int]) -> None:
    rows, columns = (min(max(int(size[name]), 1), 2**15) for name in ("rows", "columns"))
    with contextlib.suppress(OSError):  # a pipe has no size
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
