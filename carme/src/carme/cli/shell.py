"""`carme session shell`: a terminal inside a running session."""

import argparse
import asyncio
import base64
import contextlib
import os
import queue
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from carme.broker import BrokerClient
from carme.cli.parsing import take_program
from carme.errors import CarmeError, InvalidRequest
from carme.jobs import Job
from carme.jobs.fabric import FabricConnection
from carme.slurm import UnixAccount
from carme.slurm.folder import job_folder
from carme.translation import message as _

CHUNK = 1 << 16  # bytes read from the keyboard or a pipe at once
STDIN, STDOUT = 0, 1
BROKEN_OUTPUT = 128 + signal.SIGPIPE

_EPILOG = """\
Without a command it is a login shell. If input or output is a pipe or a file, both pass
unchanged. The exit code is the command's.

examples:
  carme session shell sk3x7d9q2
  carme session shell sk3x7d9q2 -- nvidia-smi
  carme session shell sk3x7d9q2 -- tar -C /tmp -cf - results > results.tar
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "shell",
        help="open a terminal inside a running session",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="carme session shell [--node N] NAME [-- COMMAND [ARGS ...]]",
    )
    parser.add_argument("name", metavar="NAME", help="the session (see: carme session list)")
    parser.add_argument(
        "--node", type=int, default=0, metavar="N", help="the session's node, 0 is its first (default: 0)"
    )
    take_program(parser, "command")
    parser.set_defaults(run=_shell)


def _shell(options: argparse.Namespace) -> int:
    client = BrokerClient()
    job = client.job(client.session(options.name).job_id)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return visit(folder_of(job, options.name), options.node, command)


def folder_of(job: Job, name: str) -> Path:
    """The private folder of the job of session `name`. Raises CarmeError unless it runs."""
    if not job.is_running or job.key is None:
        raise CarmeError(
            _(
                "The session {name} is not running: its job {job_id} is {state}.",
                name=name,
                job_id=job.id,
                state=job.state.lower(),
            ),
            _("Check its state with: carme session show {name}", name=name),
        )
    return job_folder(UnixAccount.numbered(os.getuid()), job.key)


def visit(folder: Path, node: int, command: list[str]) -> int:
    """Run `command`, or a login shell, in the job whose private folder is `folder`; its exit code.

    Args:
        node: Which of the job's nodes, by node rank.
    """
    on_terminal = os.isatty(STDIN) and os.isatty(STDOUT)

    async def run() -> int:
        connection = await FabricConnection.open(folder)
        with contextlib.closing(connection):
            return await _Visit(connection, _number(connection, node), on_terminal).run(command)

    return asyncio.run(run())


def _number(connection: FabricConnection, node: int) -> int:
    if not 0 <= node < len(connection.nodes):
        hosts = ", ".join(f"{index}: {member['host']}" for index, member in enumerate(connection.nodes))
        raise InvalidRequest(
            _("There is no node {node} in this session.", node=node),
            _("Choose one of its nodes ({hosts}).", hosts=hosts),
            field="node",
        )
    return connection.nodes[node]["number"]


class _Visit:
    """One program there, and the terminal or pipes here."""

    def __init__(self, connection: FabricConnection, number: int, on_terminal: bool) -> None:
        self._connection = connection
        self._number = number
        self._on_terminal = on_terminal
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._output: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._printed = asyncio.Event()
        self._taken = threading.Event()

    async def run(self, command: list[str]) -> int:
        environment = {"TERM": os.environ.get("TERM", "dumb")} if self._on_terminal else {}
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self._loop.add_signal_handler(number, self._end, 128 + number)
        self._loop.add_signal_handler(signal.SIGINT, self._interrupt)
        self._loop.add_signal_handler(signal.SIGWINCH, self._resized)
        with _raw_terminal() if self._on_terminal else contextlib.nullcontext():
            request = {"type": "shell", "command": command, "environment": environment, "size": self._size()}
            return await self._attend(request)

    async def _attend(self, request: dict[str, Any]) -> int:
        self._send(request)
        # Threads, because a file cannot be waited for and neither may hold up the other; daemons, because one
        # that waits for a key or for a reader must not keep this program.
        for work in (self._print, self._read_input):
            threading.Thread(target=work, daemon=True).start()
        listening = asyncio.create_task(self._listen())
        listening.add_done_callback(self._stopped_listening)
        try:
            return await self._code
        finally:
            listening.cancel()

    async def _listen(self) -> int:
        while True:
            event = await self._connection.next_event()
            match event.get("type"):
                case "shown":
                    self._output.put((event["stream"], base64.b64decode(event["data"])))
                case "taken":
                    self._taken.set()
                case "ended":
                    self._output.put(None)
                    await self._printed.wait()
                    if event["code"] == -signal.SIGHUP:
                        raise CarmeError(
                            _("The other side hung up."),
                            _("See whether the session still runs: carme session list"),
                        )
                    return event["code"] if event["code"] >= 0 else 128 - event["code"]
                case "refused":
                    raise CarmeError(event["message"], _("Try again, or start the session again."))
                case None if self._number not in (member["number"] for member in self._connection.nodes):
                    raise CarmeError(
                        _("The node of this shell was lost."), _("See whether it is down with: carme status")
                    )

    def _stopped_listening(self, listening: "asyncio.Task[int]") -> None:
        if listening.cancelled() or self._code.done():
            return
        if error := listening.exception():
            self._code.set_exception(error)
        else:
            self._code.set_result(listening.result())

    def _end(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    def _interrupt(self) -> None:
        self._send({"type": "signal", "signal": signal.SIGINT})

    def _resized(self) -> None:
        if self._on_terminal:
            self._send({"type": "size", "size": self._size()})

    def _size(self) -> dict[str, int] | None:
        if not self._on_terminal:
            return None
        size = os.get_terminal_size(STDOUT)
        # A terminal that nobody has given a size says 0, with which a shell shows no prompt.
        return {"rows": size.lines or 24, "columns": size.columns or 80}

    def _send(self, request: dict[str, Any]) -> None:
        self._connection.send(self._number, request)

    def _take_input(self, data: bytes) -> None:
        if data or not self._on_terminal:
            self._send({"type": "input", "data": base64.b64encode(data).decode("ascii")})
        else:
            self._end(128 + signal.SIGHUP)  # the terminal is gone

    def _read_input(self) -> None:
        data = b"x"
        while data:
            try:
                data = os.read(STDIN, CHUNK)
            except OSError:
                data = b""
            self._in_loop(self._take_input, data)
            self._taken.wait()
            self._taken.clear()

    def _print(self) -> None:
        while (item := self._output.get()) is not None:
            stream, data = item
            try:
                _write(stream, data)
            except OSError:
                self._in_loop(self._end, BROKEN_OUTPUT)
                return
            self._in_loop(self._send, {"type": "more", "bytes": len(data)})
        self._in_loop(self._printed.set)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
            self._loop.call_soon_threadsafe(call, *arguments)


def _write(stream: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(stream, view) :]


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Pass every key on as it is; afterwards the terminal is as it was before."""
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
        sys.stdout.flush()
