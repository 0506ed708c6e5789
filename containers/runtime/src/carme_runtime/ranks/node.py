"""Starts ranks on this node, streams their output, and ends them.

A run is known by its channel. Requests to a node and the events that answer them are JSON objects:

    {"type": "port"}                              -> {"type": "port", "port": number}
    {"type": "start", "command", "cwd", "environment",
     "ranks": [{"rank", "environment", "devices", "cpus", "memory"}]}
                                                  "devices" and "cpus": first and last but one of the node's
                                                  GPUs and cores (ordered as in `cores.py`) that the
                                                  rank gets alone; "memory": true: only of the NUMA nodes of
                                                  its cores; they may be absent
    {"type": "signal", "signal": number}          to the process groups of all ranks
    {"type": "stop"}                              SIGTERM, and after a grace period SIGKILL
    {"type": "more", "bytes": count}              so much of the output was printed

    {"type": "clean", "script", "spared", "signal": number or null}
                                                  end what earlier runs left behind (see `orphans.clear`)
                                                  -> {"type": "cleaned", "processes": [{"pid", "command",
                                                  "ended"}]}

    {"type": "refused", "message": text, "remedy": text}   a rank could not be started, or nothing cleaned;
                                                  the remedy may be absent
    {"type": "output", "rank", "stream": 1 or 2, "text", "bytes"}
    {"type": "exit", "rank", "code", "stopped"}   code negative: the signal that killed it; stopped: whether
                                                  that can have been the end of the grace period
    {"type": "over"}                              all ranks ended, and their output is complete

A shell, or another program for a person, is such a run too:

    {"type": "shell", "command", "environment", "size": {"rows", "columns"}}   no size: without a terminal
    {"type": "input", "data": base64}             no data: it has ended; the next one after "taken"
    {"type": "size", "size": {"rows", "columns"}} of the person's terminal, which changed
    {"type": "signal", ...}, {"type": "more", ...}

    {"type": "taken"}                             the input reached the program
    {"type": "shown", "stream", "data": base64, "bytes"}
    {"type": "ended", "code"}                     the program ended, and its output is complete
"""

import asyncio
import codecs
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from carme_runtime import oom_score
from carme_runtime.addresses import (
    TURN_LOOPBACK_ON,
    interface_of,
    loopback_is_down,
    loopback_works,
    meets_here,
)
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.ranks import orphans
from carme_runtime.ranks.cores import in_order
from carme_runtime.ranks.environment import without_secrets
from carme_runtime.ranks.orphan_cleanup import OrphanCleanup
from carme_runtime.ranks.outputs import Outputs
from carme_runtime.ranks.shell import Shell
from carme_runtime.ranks.waiting import call_on_exit

GRACE = 5.0  # seconds between SIGTERM and SIGKILL

# These describe the node, not the run: each node's own value counts, whatever the caller has.
NODE_VARIABLES = (
    "CARME_AGENT", "CARME_AGENT_STEP", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL", "HOSTNAME",
    "SLURMD_NODENAME",
    "SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_TOPOLOGY_ADDR",
)  # fmt: skip

Reply = Callable[[dict[str, Any]], None]


class Node:
    """Runs the ranks of any number of runs on this node.

    Args:
        environment: the node's own environment: that of shells, and for ranks the source of NODE_VARIABLES.
        address: at which other nodes reach this one.
        key_file: where this node has the job's key.
    """

    def __init__(self, environment: Mapping[str, str], address: str, key_file: Path | None = None) -> None:
        self._environment = dict(environment)
        self._cleanup = OrphanCleanup()
        self._runs: dict[str, _Run | Shell] = {}
        self._begun = 0  # runs
        self._cleaning: set[asyncio.Task[None]] = set()
        self._key_file = str(key_file.absolute()) if key_file else ""
        self.host = environment.get("SLURMD_NODENAME") or socket.gethostname()
        self.address = address

    def describe(self) -> dict[str, Any]:
        """What others need to know of this node to place ranks on it."""
        return {
            "host": self.host,
            "address": self.address,
            "devices": count_devices(self._environment),
            "cpus": len(os.sched_getaffinity(0)),
            "interface": interface_of(self.address),
            "key_file": self._key_file,
        }

    def announce_agent(self, socket_path: Path) -> None:
        """Name the agent's socket to ranks and shells as CARME_AGENT."""
        self._environment["CARME_AGENT"] = str(socket_path)
        if step := self._environment.get("SLURM_STEP_ID"):
            self._environment["CARME_AGENT_STEP"] = step  # so that what runs here is not taken for srun's own

    def handle(self, channel: str, request: dict[str, Any], reply: Reply) -> None:
        """Do what a request of the run `channel` asks; `reply` takes the events."""
        run = self._runs.get(channel)
        if run and run.over.done():  # another run of the same caller may follow at once
            run = None
        if request["type"] == "port":
            reply({"type": "port", "port": self._free_port()})
        elif request["type"] == "start" and not run:
            self._begun += 1
            run = _Run(self._cleanup, self._node_environment(), self.host, reply, self._begun)
            self._add(channel, run)
            run.start(request)
        elif request["type"] == "clean":
            task = asyncio.ensure_future(self._clean(request, reply))
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)
        elif request["type"] == "shell" and not run:
            self._open_shell(channel, request, reply)
        elif isinstance(run, Shell):
            run.take(request)
        elif run and request["type"] == "signal":
            run.signal(signal.Signals(request["signal"]))
        elif run and request["type"] == "stop":
            run.stop()
        elif run and request["type"] == "more":
            run.allow(int(request["bytes"]))

    def _open_shell(self, channel: str, request: dict[str, Any], reply: Reply) -> None:
        try:
            shell = Shell(self._cleanup, without_secrets(self._environment), reply, request)
        except OSError as error:
            reply(
                {"type": "refused", "message": f"No shell can be started on {self.host}: {error.strerror}."}
            )
        else:
            self._add(channel, shell)

    async def _clean(self, request: dict[str, Any], reply: Reply) -> None:
        begun = self._begun
        running = {run.number for run in self._runs.values() if isinstance(run, _Run)}

        def is_over(number: int) -> bool:
            return number <= begun and number not in running  # and not one that begins meanwhile

        number = request["signal"] and signal.Signals(request["signal"])
        grace = GRACE if number else 0.0
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                None, orphans.clear, is_over, request["script"], request["spared"], number, grace
            )
        except OSError as error:
            message = f"What is left on {self.host} cannot be ended: {error.strerror}."
            reply({"type": "refused", "message": message, "remedy": "End it with kill."})
        else:
            reply({"type": "cleaned", "processes": [dataclasses.asdict(each) for each in found]})

    def _add(self, channel: str, run: "_Run | Shell") -> None:
        def forget(_: object) -> None:
            if self._runs.get(channel) is run:
                del self._runs[channel]

        self._runs[channel] = run
        run.over.add_done_callback(forget)

    def end(self, channel: str) -> None:
        """Nobody listens to the run `channel` any more: stop it."""
        run = self._runs.get(channel)
        if run:
            run.abandon()

    def channels(self) -> list[str]:
        """The runs that have ranks here."""
        return list(self._runs)

    async def close(self) -> None:
        """Stop all runs, wait until every rank is gone."""
        runs = list(self._runs.values())
        for run in runs:
            run.stop()
        await asyncio.gather(*(run.over for run in runs))
        self._cleanup.close()

    def _node_environment(self) -> dict[str, str | None]:
        return {name: self._environment.get(name) for name in NODE_VARIABLES}

    def _free_port(self) -> int:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]


def count_devices(environment: Mapping[str, str]) -> int:
    """How many GPUs CUDA_VISIBLE_DEVICES names; 0 when it is not set."""
    names = environment.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    return len([name for name in names if name not in ("", "-1", "NoDevFiles")])


def _devices(environment: Mapping[str, str], selected: list[int] | None) -> dict[str, str]:
    """The variable that shows a rank some of the node's GPUs."""
    if selected is None:
        return {}
    names = environment.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[selected[0] : selected[1]])}


@contextlib.contextmanager
def _pin_thread(selected: list[int] | None, memory: bool) -> Iterator[None]:
    """This thread, and so what it starts, runs on some of the node's cores; with `memory` near them."""
    cores = os.sched_getaffinity(0)
    own = cores if selected is None else set(in_order(cores)[selected[0] : selected[1]])
    with contextlib.ExitStack() as stack:
        if own != cores:
            stack.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, own)
        if memory:
            from carme_runtime.ranks.memory import bound  # seldom wanted, and agents are to start quickly

            stack.enter_context(bound(own))
        yield


@dataclasses.dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    running: bool = True


class _Run:
    def __init__(
        self,
        cleanup: OrphanCleanup,
        node_environment: dict[str, str | None],
        host: str,
        reply: Reply,
        number: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._cleanup = cleanup
        self._node_environment = node_environment
        self._host = host
        self._reply = reply
        self.number = number
        self._ranks: list[_Rank] = []
        self._outputs = Outputs(self._settle)
        self._reaped = False
        self._grace: asyncio.TimerHandle | None = None
        self._killing = False
        self.over: asyncio.Future[None] = self._loop.create_future()

    def start(self, request: dict[str, Any]) -> None:
        command, cwd = list(request["command"]), request["cwd"]
        if not Path(cwd).is_dir():
            self._refuse(f"The folder {cwd} does not exist on {self._host}.")
            return
        if any(meets_here(rank["environment"]) for rank in request["ranks"]) and not loopback_works():
            self._refuse(loopback_is_down(self._host), TURN_LOOPBACK_ON)
            return
        base = dict(request["environment"])
        for name, value in self._node_environment.items():
            base.pop(name, None)
            if value is not None:
                base[name] = value
        base[orphans.MARK] = orphans.mark(self.number)
        self._cleanup.begin()
        for rank in request["ranks"]:
            self._cleanup.expect(f"{orphans.MARK}={base[orphans.MARK]}")
            try:
                with (
                    _pin_thread(rank.get("cpus"), bool(rank.get("memory"))),
                    oom_score.children_at(oom_score.RANK),
                ):
                    process = subprocess.Popen(
                        command,
                        cwd=cwd,
                        env=base | _devices(base, rank.get("devices")) | rank["environment"],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        bufsize=0,
                        start_new_session=True,
                    )
            except CarmeRuntimeError as error:
                self._refuse(f"On {self._host}: {error.message}", error.remedy)
                return
            except (OSError, ValueError, TypeError) as error:  # the last: variables that are not text
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self._refuse(f"{command[0]} cannot be started on {self._host}: {reason}.")
                return
            self._cleanup.watch(process.pid)
            self._add(_Rank(rank["rank"], process))

    def signal(self, number: signal.Signals) -> None:
        if self._reaped:
            return
        for rank in self._ranks:
            # A rank that ended is still a zombie, so its number cannot belong to somebody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, number)

    def stop(self) -> None:
        if self._grace is None and not self.over.done():
            self._grace = self._loop.call_later(GRACE, self._kill)
            self.signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._killing = True
        self.signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Stop, and throw the output away, so that no rank waits for a reader."""
        self._reply = lambda event: None
        self._outputs.abandon()
        self.stop()

    def allow(self, count: int) -> None:
        self._outputs.allow(count)

    def _refuse(self, message: str, remedy: str = "") -> None:
        reported = {"remedy": remedy} if remedy else {}
        self._reply({"type": "refused", "message": message} | reported)
        self.stop()
        self._finish_when_all_ended()

    def _add(self, rank: _Rank) -> None:
        self._ranks.append(rank)
        for stream, pipe in ((1, rank.process.stdout), (2, rank.process.stderr)):
            assert pipe
            self._outputs.add(pipe, self._sender(rank.number, stream))
        call_on_exit(rank.process.pid, lambda code: self._exited(rank, code))

    def _sender(self, rank: int, stream: int) -> Callable[[bytes], None]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def send(data: bytes) -> None:
            text = decoder.decode(data, final=not data)
            if text or data:
                event = {"type": "output", "rank": rank, "stream": stream}
                self._reply(event | {"text": text, "bytes": len(data)})

        return send

    def _exited(self, rank: _Rank, code: int) -> None:
        rank.running = False
        self._reply({"type": "exit", "rank": rank.number, "code": code, "stopped": self._killing})
        self._finish_when_all_ended()

    def _finish_when_all_ended(self) -> None:
        if self._reaped or any(rank.running for rank in self._ranks):
            return
        if self._grace:
            self._grace.cancel()
        self.signal(signal.SIGKILL)  # children that ranks left behind
        for rank in self._ranks:
            self._cleanup.forget(rank.process.pid)
            rank.process.wait()
        self._reaped = True
        self._outputs.end_soon()
        self._settle()

    def _settle(self) -> None:
        if self._reaped and not self._outputs and not self.over.done():
            self.over.set_result(None)
            self._reply({"type": "over"})
