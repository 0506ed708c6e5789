"""Programs beside the ranks of a run, which a framework needs and which end with the run."""

import asyncio
import contextlib
import os
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric, connect
from carme_runtime.fabric.members import Member
from carme_runtime.launcher.output import Tail
from carme_runtime.ranks import without_secrets

START_SECONDS = 600.0  # until it says that it is ready; importing a framework from a busy file system is slow
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Process:
    """One process of a program.

    Args:
        member: Its node.
        environment: What it gets on top of the run's variables.
        devices: First and last but one of the node's GPUs that it sees; None: all.
    """

    member: Member
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int, int] | None = None


@dataclass(frozen=True)
class Program:
    """A program beside the ranks.

    Args:
        name: For people.
        command: What each of its processes executes.
        processes: Where they run.
        ready: What a process writes when others may rely on it; empty: they need not wait.
    """

    name: str
    command: list[str]
    processes: list[Process]
    ready: str = ""

    @property
    def hosts(self) -> list[str]:
        """The nodes that it runs on."""
        return list(dict.fromkeys(process.member.host for process in self.processes))

    @property
    def hosts_with_counts(self) -> list[str]:
        """The same for people, with how many processes a node has where they are several."""
        counts = Counter(process.member.host for process in self.processes)
        return [f"{host} ({count} times)" if count > 1 else host for host, count in counts.items()]


class Programs:
    """Starts programs one after the other, as a context that ends them in the opposite order.

    They run on connections of their own to the fabric: if this process ends, in whatever way, the agents of
    their nodes end them.

    Args:
        programs: What is started.
        environment: Of all of them.
        cwd: Their folder.
    """

    def __init__(self, programs: list[Program], environment: Mapping[str, str], cwd: str) -> None:
        self._programs = programs
        self._environment = without_secrets(environment)
        self._cwd = cwd
        self._running: list[_Running] = []

    async def __aenter__(self) -> "Programs":
        try:
            for program in self._programs:
                running = _Running(program, await connect(os.environ))
                self._running.append(running)
                await running.start(self._environment, self._cwd)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Call `report` with a sentence if one of them fails while the run goes on."""
        for running in self._running:
            running.on_failure(report)

    async def _end(self) -> None:
        for running in reversed(self._running):
            await running.end()


class _Running:
    def __init__(self, program: Program, fabric: Fabric) -> None:
        self._program = program
        self._fabric = fabric
        self._hosts = {number: process.member.host for number, process in enumerate(program.processes)}
        self._nodes = {process.member.number for process in program.processes}
        self._tails = {number: Tail() for number in self._hosts}
        self._text = dict.fromkeys(self._hosts, "")
        self._unready = set(self._hosts) if program.ready else set[int]()
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._failure: asyncio.Future[str] = loop.create_future()
        self._stopping = False
        self._task = asyncio.create_task(self._follow())

    async def start(self, environment: Mapping[str, str], cwd: str) -> None:
        """Start the processes, and wait until they are ready.

        Raises:
            CarmeRuntimeError: They could not be started.
        """
        for node in self._nodes:
            ranks = [
                {"rank": number, "environment": {"PYTHONUNBUFFERED": "1"} | dict(process.environment)}
                | ({"devices": list(process.devices)} if process.devices else {})
                for number, process in enumerate(self._program.processes)
                if process.member.number == node
            ]
            request = {"command": self._program.command, "cwd": cwd, "environment": dict(environment)}
            self._fabric.send(node, {"type": "start", "ranks": ranks} | request)
        if not self._unready:
            return
        waited = {self._ready, self._failure}
        await asyncio.wait(waited, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            raise CarmeRuntimeError(self._failure.result(), "See that all nodes have the same environment.")
        if not self._ready.done():
            host = self._hosts[min(self._unready)]
            raise CarmeRuntimeError(
                f"{self._program.name} on {host} was not ready after {START_SECONDS:.0f} s.",
                f"Try there whether this works: {shlex.join(self._program.command[:4])} --help",
            )

    def on_failure(self, report: Callable[[str], None]) -> None:
        self._failure.add_done_callback(
            lambda failure: None if failure.cancelled() else report(failure.result())
        )

    async def end(self) -> None:
        """Stop the processes and wait until they are gone, or for as long as is reasonable."""
        self._stopping = True
        if not self._task.done():
            for node in self._nodes:
                self._fabric.send(node, {"type": "stop"})
            await asyncio.wait({self._task}, timeout=STOP_SECONDS)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._failure.cancel()
        await self._fabric.close()

    async def _follow(self) -> None:
        async for node, event in self._events():
            kind = event["type"]
            if kind == "output":
                self._fabric.send(node, {"type": "more", "bytes": event["bytes"]})
                self._read(event["rank"], event["text"])
            elif kind == "refused":
                self._fail(event["message"])
            elif kind == "exit" and event["code"] != 0:
                self._exited(event["rank"], event["code"])

    async def _events(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """What happens, until all have ended or their nodes are out of reach."""
        remaining = set(self._nodes)
        while remaining:
            event = await self._fabric.next_event()
            lost = remaining - {member.number for member in self._fabric.members.present}
            if event.gone or lost:
                self._fail(f"A node of {self._program.name} was lost.")
                if event.gone:
                    return
                remaining -= lost
            elif event.node is not None:
                yield event.node, event.content
                if event.content["type"] == "over":
                    remaining.discard(event.node)

    def _read(self, number: int, text: str) -> None:
        self._tails[number].feed(text)
        if number in self._unready:
            self._text[number] += text
            if self._program.ready in self._text[number]:
                self._unready.discard(number)
                self._text[number] = ""
                if not self._unready and not self._ready.done():
                    self._ready.set_result(None)

    def _exited(self, number: int, code: int) -> None:
        ending = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        self._fail(
            f"{self._program.name} on {self._hosts[number]} {ending}. Its last output:\n"
            f"{self._tails[number].report()}\n"
        )

    def _fail(self, sentence: str) -> None:
        if not self._stopping and not self._failure.done():
            self._failure.set_result(sentence)
