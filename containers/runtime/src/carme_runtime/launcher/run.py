"""One run, from the start of its ranks to its exit code."""

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric
from carme_runtime.fabric.members import Members
from carme_runtime.launcher.help import Section, help_link
from carme_runtime.launcher.output import Lines, Printer, Tail
from carme_runtime.launcher.placement import Place, rank_environment
from carme_runtime.launcher.rank_options import RankOptions
from carme_runtime.ranks import without_secrets
from carme_runtime.scaling import ending

INTERRUPT_GRACE = 10.0  # seconds that ranks have to end by themselves after Ctrl-C
NAMED_RANKS = 8  # of those that ended well before another one failed
BROKEN_OUTPUT = 128 + signal.SIGPIPE


class Run:
    """A run on `fabric` at `places`; `command` is an argument list, the same for all ranks.

    Args:
        rank_options: How ranks are run.
        restart: How often ranks were started before this: logs go on.
        grows: Whether the run is to end because these members leave room for more ranks than it has.
        variables: By rank, what it gets on top of the variables of every run.
        explains: What the last error output of the rank that failed means; empty where it says so itself.
    """

    def __init__(
        self,
        fabric: Fabric,
        places: list[Place],
        command: list[str],
        cwd: str,
        environment: Mapping[str, str],
        rank_options: RankOptions,
        restart: int = 0,
        grows: Callable[[Members], bool] = lambda members: False,
        variables: Mapping[int, Mapping[str, str]] | None = None,
        explains: Callable[[str], str] = lambda output: "",
    ) -> None:
        self._fabric = fabric
        self._places = places
        self._command = command
        self._cwd = cwd
        self._environment = without_secrets(environment)
        self._rank_options = rank_options
        self._variables = variables or {}
        self._explains = explains
        self._logs = _open_logs(rank_options.log_folder, places, restart > 0)
        self._grows = grows
        self._loop = asyncio.get_running_loop()
        colour = {stream: os.isatty(stream) and "NO_COLOR" not in environment for stream in (1, 2)}
        self._lines = {
            (place.rank, stream): Lines(place.rank, colour[stream]) for place in places for stream in (1, 2)
        }
        self._tails = {place.rank: Tail() for place in places}
        self._hosts = {place.rank: place.member.host for place in places}
        self._open = {
            place.member.number: place.member.host for place in places
        }  # nodes that still run ranks
        self._failed: tuple[int, int] | None = None  # rank and code of the first that failed
        self._ended_well: list[int] = []  # ranks that ended with 0 by themselves while none had failed
        self._trouble: tuple[int, str] | None = None  # exit code and sentence, where no rank is to blame
        self.lost: set[int] = set()  # ranks that were killed, but not by this run
        self.lost_hosts: list[str] = []
        self.growing = False  # ended for the sake of more ranks
        self._final = False  # ended in a way after which nothing can go on
        self._interrupts = 0
        self._started = False
        self._stopping = False
        self._printer = Printer(lambda: self._in_loop(self._output_broke))

    @property
    def recoverable(self) -> bool:
        """Whether the ranks ended because some of them failed or were lost, or to become more."""
        failed = bool(self._failed or self.lost_hosts or self.growing)
        return failed and not self._final and not self._interrupts

    async def execute(self) -> int:
        """Start the ranks, show their output, and return the exit code of the run.

        0 when all ranks ended with 0, else that of the rank that failed first (128 + number for a
        signal). All ranks have ended, or are out of reach, when this returns.
        """
        for number, handler in (
            (signal.SIGINT, self._interrupt),
            (signal.SIGTERM, self._terminate),
            (signal.SIGHUP, self._terminate),
        ):
            # nohup has the run outlive its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._loop.add_signal_handler(number, handler)
        # No port is known before rank 0's node has found a free one.
        self._fabric.send(self._places[0].member.number, {"type": "port"})
        while self._open:
            event = await self._fabric.next_event()
            if event.gone:
                self._final = True
                self._blame(1, "The job's agent on this node was lost, and the run with it. Start a new job.")
                break
            if event.node is None:
                self._check_members()
            elif event.node in self._open:
                self._take(event.node, event.content)
        for (_, stream), lines in self._lines.items():
            self._printer.put(stream, lines.finish())
        code = self._conclude()
        await self._loop.run_in_executor(None, self._printer.close)
        for log in self._logs.values():
            os.close(log)
        return code

    def _take(self, node: int, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "port":
            if self._stopping or self._interrupts:
                self._open.clear()
            else:
                self._start(event["port"])
        elif kind == "refused":
            self._final = True
            remedy = event.get("remedy", "Use files and programs that every node has at the same place.")
            self._blame(1, f"{event['message']} {remedy}")
            self._stop()
        elif kind == "output":
            rank, stream, text = event["rank"], event["stream"], event["text"]
            if stream == 2:
                self._tails[rank].feed(text)
            allow = functools.partial(
                self._in_loop, self._fabric.send, node, {"type": "more", "bytes": event["bytes"]}
            )
            if rank in self._logs:
                self._printer.put(self._logs[rank], text)
            shown = self._rank_options.output == "all" or rank == 0
            self._printer.put(stream, self._lines[rank, stream].feed(text) if shown else "", allow)
        elif kind == "exit":
            if event["code"] < 0 and event["code"] != -signal.SIGTERM and not event["stopped"]:
                self.lost.add(event["rank"])
            if event["code"] == 0 and not self._failed and not self._stopping:
                self._ended_well.append(event["rank"])
            if event["code"] != 0 and not self._failed and not self._stopping:
                self._failed = (event["rank"], event["code"])
                if not self._interrupts:
                    self._stop()
        elif kind == "over":
            del self._open[node]

    def _start(self, port: int) -> None:
        self._started = True
        for node in self._open:
            ranks = [
                {
                    "rank": place.rank,
                    "environment": rank_environment(place, self._places, port, self._environment)
                    | dict(self._variables.get(place.rank, {})),
                }
                | self._rank_options.of(place)
                for place in self._places
                if place.member.number == node
            ]
            request = {"command": self._command, "cwd": self._cwd, "environment": self._environment}
            self._fabric.send(node, {"type": "start", "ranks": ranks} | request)

    def _check_members(self) -> None:
        present = {member.number for member in self._fabric.members.present}
        lost = [node for node in self._open if node not in present]
        if not lost and 0 in present:
            if not self._stopping and self._grows(self._fabric.members):
                self.growing = True
                self._stop()
            return
        self._final = self._final or 0 not in present
        self.lost_hosts += [self._open[node] for node in lost]
        hosts = [self._open[node] for node in lost] if 0 in present else [self._fabric.members.lost[-1]]
        named = " and ".join(hosts)
        self._blame(
            1,
            f"The agent of {named} was lost, so the run was ended. See whether the node is down (sinfo -R); "
            "start a new job, or go on with fewer --nodes." + help_link(Section.LOSS),
        )
        for node in lost:
            del self._open[node]
        self._stop()

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._send_all({"type": "stop"})

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._send_all({"type": "signal", "signal": signal.SIGINT})
            self._loop.call_later(INTERRUPT_GRACE, self._stop)
        else:
            self._send_all({"type": "signal", "signal": signal.SIGKILL})

    def _terminate(self) -> None:
        self._final = True
        self._blame(128 + signal.SIGTERM, "The run was ended by a signal.")
        self._stop()

    def fail(self, sentence: str) -> None:
        """End the run, because something that it needs is gone."""
        self._final = True
        self._blame(1, sentence)
        self._stop()

    def _output_broke(self) -> None:
        self._final = True
        self._blame(BROKEN_OUTPUT, "")
        self._stop()

    def _send_all(self, request: dict[str, Any]) -> None:
        for node in self._open:
            self._fabric.send(node, request)

    def _blame(self, code: int, sentence: str) -> None:
        if not self._trouble and not self._failed:
            self._trouble = (code, sentence)

    def _conclude(self) -> int:
        """Say how the run ended, unless it ended well."""
        if self._trouble:
            code, sentence = self._trouble
            if sentence:
                self._printer.put(2, f"carme-run: {sentence}\n")
            return code
        if not self._failed:
            return 128 + signal.SIGINT if self._interrupts and (self._stopping or not self._started) else 0
        rank, code = self._failed
        if self._interrupts:
            self._printer.put(2, "carme-run: The run was interrupted.\n")
        else:
            self._printer.put(2, self._report(rank, code))
        return code if code > 0 else 128 - code

    def _report(self, rank: int, code: int) -> str:
        cause = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        sentence = f"carme-run: Rank {rank} on {self._hosts[rank]} {cause}"
        sentence += ", so the others were stopped." if len(self._places) > 1 else "."
        if code == -signal.SIGKILL:
            sentence += " This is often a lack of memory: use less of it, or start a job with more."
        tail = self._tails[rank].report()
        if ending.has_explained(code, tail):
            return ""
        if meaning := self._explains(tail):
            sentence += f" {meaning}"
        heading = "Its last error output"
        # The rank's own error can only say that another one was lost. One that carme-run ends says all.
        if code == 1 and self._tails[rank].has_traceback() and (ended := self._shown_ended_well()):
            sentence += (
                f" {ended} had ended with exit code 0 before. If rank {rank} waited for one that had ended, "
                "let all ranks make the same number of steps."
            )
            heading = f"The last error output of rank {rank}"
        if tail:
            sentence += f" {heading}:\n{tail}"
        return f"{sentence}{help_link(Section.FAILURE)}\n"

    def _shown_ended_well(self) -> str:
        """Which ranks ended well before one failed, as the subject of a sentence; empty where none did."""
        ranks = [str(rank) for rank in sorted(self._ended_well)]
        if len(ranks) > NAMED_RANKS:
            return f"{len(ranks)} ranks"
        first = ", ".join(ranks[:-1])
        return f"Ranks {first} and {ranks[-1]}" if first else f"Rank {ranks[0]}" if ranks else ""

    def _in_loop(self, call: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(call, *arguments)


def _open_logs(folder: Path | None, places: list[Place], go_on: bool) -> dict[int, int]:
    """By rank, the descriptor of its log; `go_on`: what it has stays."""
    if folder is None:
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if go_on else os.O_TRUNC)
        return {place.rank: os.open(folder / f"rank-{place.rank}.log", flags, 0o666) for place in places}
    except OSError as error:
        raise CarmeRuntimeError(
            f"The folder {folder} for logs cannot be used: {error.strerror}.",
            "Choose one that you may write to.",
        ) from None


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
