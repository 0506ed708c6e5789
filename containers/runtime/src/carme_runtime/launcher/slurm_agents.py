"""Agents on the nodes of a Slurm job without Carme: one here, and one on each other node that `srun` starts.

They live as long as one `carme-run`. The agent here ends with its command, which is `stay`: that reads a pipe
until nobody holds its other end any more. `carme-run` does, and mpirun where that takes its place, so also
their SIGKILL ends the agents. The others end with the first one. Their key and their certificate are in a
private folder that all nodes see, and reach the agents as names of files.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import carme_runtime
from carme_runtime.addresses import is_loopback
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import credentials, mpi, service
from carme_runtime.fabric.credentials import CERTIFICATE, KEY
from carme_runtime.fabric.members import Members
from carme_runtime.launcher import slurm
from carme_runtime.launcher.nodes import JOIN_SECONDS, too_few_nodes

POLL_SECONDS = 0.05
END_SECONDS = 10.0  # for agents to end by themselves, and again after a signal; Slurm's KillWait is 30 s
ANNOUNCED, SOCKET = "fabric.json", "agent.sock"
LINES = 12  # of the agents' output in an error
#: What `srun` needs to know of its job. It takes most other variables of this kind for options.
FOR_SRUN = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JOB_ID", "SLURM_JWT", "SLURM_WORKING_CLUSTER")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Such as "srun: error: n2: task 0: Exited with exit code 1", and so "Killed" or "Out Of Memory".
_FAILED_TASK = re.compile(r"^srun: error: (\S+): tasks? [^:\s]+: ", re.MULTILINE)
_LOST = re.compile(rf"{_FAILED_TASK.pattern}|^carme-agent: the agent of \S+ was lost", re.MULTILINE)
_GPUS_DIFFER = (
    "Each node must have as many GPUs of the job as the first one: submit it with --gpus-per-node, or choose "
    "nodes by --nodes"
)
_SOURCE = str(Path(carme_runtime.__file__).parents[1])


@dataclass(frozen=True)
class Plan:
    """Where agents are started, and by which files they know each other."""

    job: str
    hosts: list[str]  # this one first
    gpus: int  # of the job on this node, and so on the others
    shared: Path
    encrypted: bool

    def srun(self) -> list[str]:
        """The beginning of the command line that starts something once on each other node.

        It may use all that the job has there. A node that fails takes no other one with it.
        """
        count = len(self.hosts) - 1
        where = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        where += [f"--nodelist={','.join(self.hosts[1:])}", "--overlap", "--mem=0", "--cpu-bind=none"]
        rest = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--mpi=none", "--export=ALL", "--input=none"]
        gpus = [f"--gres=gpu:{self.gpus}"] if self.gpus else []
        return ["srun", "--job-name=carme-agents", *where, *gpus, *rest, "--chdir=/"]

    def members(self, known: Members) -> Members:
        """What nodes there would be, if the others were as this one."""
        like = replace(
            known.present[0], interface="", key_file=str(self.shared / f"slurm-{self.job}-*/{KEY}")
        )
        members = [replace(like, number=n, host=host, address=host) for n, host in enumerate(self.hosts)]
        return Members.of(members, [], len(members))

    def report(self) -> str:
        """What would be started, as a sentence for a dry run."""
        return (
            f"On {', '.join(self.hosts[1:])}, which may have other cores or GPUs than this node, srun would "
            f"start agents: {shlex.join(self.srun())} ..."
        )


def plan(options: Namespace, environment: Mapping[str, str]) -> Plan | None:
    """How agents are to be started for a run that found none; None: it uses this host alone.

    Raises:
        CarmeRuntimeError: More nodes were requested than the job has.
    """
    if options.cleanup or not slurm.takes_all_nodes(environment, nodes_for(options)):
        return None
    hosts = slurm.node_names(environment)
    if options.nodes and options.nodes > len(hosts):
        raise too_few_nodes(options.nodes, len(hosts))
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return Plan(
        environment["SLURM_JOB_ID"],
        hosts[: options.nodes],
        int(gpus) if gpus.isdecimal() else 0,
        (options.shared_folder or Path.home() / ".carme").absolute(),
        not options.unencrypted,
    )


def nodes_for(options: Namespace) -> int | None:
    """How many nodes the options ask for; None: all that there are."""
    alone = options.n == 1 and not (options.nodes or options.hostfile or options.max_ranks)
    return 1 if alone else options.nodes


@contextlib.asynccontextmanager
async def started(plan: Plan, environment: MutableMapping[str, str]) -> AsyncIterator[None]:
    """Agents on all nodes, which have joined; `environment` then leads to them as in a session.

    Raises:
        CarmeRuntimeError: The folder cannot be used, no certificate can be made, nothing can be started here,
            or nodes do not join.
    """
    address = _address(environment)
    agents = _Agents(plan, _make_folder(plan))
    try:
        await agents.start(address, environment)
        yield
    finally:
        with _signals_ignored():
            ending = asyncio.ensure_future(agents.end())
            while not ending.done():  # whatever else came at the same time
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)


class _Agents:
    """The agents of one run, and what they leave behind.

    Args:
        plan: Where they are started.
        folder: Private, empty, and seen by all nodes; `end` removes it.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder, self._place = plan, folder, folder
        self._pipe: tuple[int, ...] = ()
        self._log: IO[bytes] | None = None
        self._first: Process | None = None
        self._srun: Process | None = None
        self._joined = False

    async def start(self, address: str, environment: MutableMapping[str, str]) -> None:
        """Start them all, and wait until they have joined; raises what `started` does."""
        try:
            await self._start(address, environment)
        except OSError as error:
            named = f" ({error.filename})" if error.filename else ""
            raise CarmeRuntimeError(
                f"The agents of this run cannot be started: {error.strerror}{named}.",
                "See what this node has run out of (df -h, ulimit -n, ulimit -u), or add --nodes 1.",
            ) from None
        await self._all_joined()
        self._joined = True
        environment["CARME_AGENT"] = str(self._place / SOCKET)
        environment.update(mpi.session_variables(self._place, address, environment))

    async def _start(self, address: str, environment: Mapping[str, str]) -> None:
        folder, hosts = self._folder, self._plan.hosts
        self._place = place = _place(folder, hosts[0])
        self._pipe = os.pipe()
        reading, writing = self._pipe
        os.set_inheritable(writing, True)  # for mpirun, if it takes the place of this process
        # Not in the folder: a file that is open cannot be removed from some file systems of a network.
        self._log = log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # `end` closes it
        try:
            options = credentials.write(folder, self._plan.encrypted)
        except OSError as error:
            raise _unusable(self._plan.shared, error) from None
        first = [*_itself("carme_runtime.fabric.command"), "--nodes", str(len(hosts)), *options]
        first += ["--announce", f"{folder}/{ANNOUNCED}", "--listen", address, "--socket"]
        first += [f"{place}/{SOCKET}", "--", *_itself(__name__), "stay", str(folder), str(place)]
        self._first = await _start(first, environment, log, reading)
        stdout = self._first.stdout
        assert stdout
        if not await stdout.readline():
            raise self._failed("The agent on this node did not start")
        command = [*self._plan.srun(), *_itself(__name__), "join", str(folder), hosts[0]]
        self._srun = await _start(command, _for_srun(environment), log)

    async def _all_joined(self) -> None:
        """Wait until all agents are there, by the list that the first one keeps. Raises CarmeRuntimeError."""
        plan, place = self._plan, self._place
        assert self._first and self._srun
        ended = asyncio.ensure_future(self._srun.wait())
        end = asyncio.get_running_loop().time() + JOIN_SECONDS
        try:
            while missing := _missing(plan, place):
                await asyncio.wait({ended}, timeout=POLL_SECONDS)
                late = asyncio.get_running_loop().time() > end
                # Of several agents one alone may have ended, which srun reports.
                failed = _FAILED_TASK.findall(self._words())
                if ended.done() or self._first.returncode is not None or late or failed:
                    if not (missing := _missing(plan, place)):
                        return
                    limit = "" if failed or not late else f" within {JOIN_SECONDS:.0f} s"
                    nodes = ", ".join(failed or missing)
                    raise self._failed(f"The agents of {nodes} did not join this run{limit}")
        finally:
            ended.cancel()

    async def end(self) -> None:
        """See that the agents here and there are over, and that nothing of them is left."""
        lost = self._joined and self._has_lost()
        for descriptor in self._pipe:
            os.close(descriptor)
        try:
            if self._first:
                await _end(self._first)
            if self._srun:
                if not self._joined:  # who has not joined does not end with the first one
                    _send(self._srun.terminate)
                await _end(self._srun)
            if lost:
                print(
                    "carme-run: Last output of srun and the agents:",
                    *self._lines(),
                    sep="\n",
                    file=sys.stderr,
                )
        finally:
            _remove(self._folder, self._place)
            if self._log:
                self._log.close()

    def _has_lost(self) -> bool:
        """Whether an agent has ended before the run."""
        over = [
            process for process in (self._first, self._srun) if process and process.returncode is not None
        ]
        return bool(over or _LOST.search(self._words()))

    def _failed(self, reason: str) -> CarmeRuntimeError:
        lines = self._lines()
        return CarmeRuntimeError(
            "\n".join([f"{reason}. Output of srun and the agents:", *lines] if lines else [f"{reason}."])
            + "\n",
            f"{_GPUS_DIFFER if 'generic resource' in self._words() else 'Fix that'}, or add --nodes 1 to run "
            "on this node alone.",
        )

    def _lines(self) -> list[str]:
        return self._words().strip().splitlines()[-LINES:]

    def _words(self) -> str:
        """What srun and the agents wrote; the place at which they go on writing stays."""
        assert self._log
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """All ends here already: one more signal would only leave files behind."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove(*folders: Path) -> None:
    """Remove folders, into which an agent that ends may still write."""
    for _ in range(100):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(folder.exists() for folder in folders):
            break
        time.sleep(POLL_SECONDS)


async def _start(
    command: list[str], environment: Mapping[str, str], log: IO[bytes], stdin: int = DEVNULL
) -> Process:
    """Start it in a session of its own: an interrupt from the terminal is for the ranks."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=DEVNULL if stdin == DEVNULL else PIPE,
        stderr=log,
        env=dict(environment),
        cwd="/",
        start_new_session=True,
    )


def _missing(plan: Plan, place: Path) -> list[str]:
    """The nodes whose agents are not there."""
    try:
        lines = (place / mpi.HYDRA_HOSTS).read_text().splitlines()
    except OSError:
        lines = []
    present = {line.rpartition(":")[0] for line in lines}
    return [host for host in plan.hosts if host not in present]


async def _end(process: Process) -> None:
    """See that it is over; kill it if it does not end by itself."""
    for send in (process.terminate, process.kill):
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
            return
        except asyncio.TimeoutError:
            _send(send)
    await process.wait()


def _send(send: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        send()


def _make_folder(plan: Plan) -> Path:
    try:
        plan.shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"slurm-{plan.job}-", dir=plan.shared))
    except OSError as error:
        raise _unusable(plan.shared, error) from None


def _unusable(shared: Path, error: OSError) -> CarmeRuntimeError:
    return CarmeRuntimeError(
        f"No private folder can be made in {shared} for this run's nodes: {error.strerror}.",
        "Name a folder that all of them see and that you can write to: --shared-folder DIR",
    )


def _place(folder: Path, host: str) -> Path:
    """A private folder for the socket of a node's agent: in the run's own, which goes however the run ends.

    Slurm kills at once what `srun` has started, when it ends a job. On file systems of a network there may be
    no sockets, or their names are too long.
    """
    place = folder / host
    try:
        place.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(place / SOCKET))
        (place / SOCKET).unlink()
        return place
    except OSError:
        return Path(tempfile.mkdtemp(prefix="carme-"))


def _address(environment: Mapping[str, str]) -> str:
    """At which other nodes reach this one. Raises CarmeRuntimeError."""
    if own := environment.get("CARME_ADDRESS"):
        return own
    for name in (environment["SLURMD_NODENAME"], socket.gethostname()):
        with contextlib.suppress(OSError):
            for *_, (address, *_) in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
                if not is_loopback(str(address)):
                    return str(address)
    raise CarmeRuntimeError(
        f"The name of node {environment['SLURMD_NODENAME']} leads to no address that other nodes can reach.",
        "Set CARME_ADDRESS to this node's address on the cluster's network, or add --nodes 1.",
    )


def _for_srun(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in FOR_SRUN or not name.startswith(("SLURM_", "SRUN_", "CARME_"))
    }


def _itself(module: str) -> list[str]:
    """The command line of this Python for a module of ours, whatever is set for the user's own programs.

    Our source is first in the path for our own package alone, as another one may be installed there. What
    else lies beside it, such as backports, is not to hide the modules of Python.
    """
    start = "import os, sys, typing; sys.path.insert(0, sys.argv.pop(1)); import carme_runtime; "
    start += f"sys.path.append(sys.path.pop(0)); from {module} import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", start, _SOURCE]


def main() -> int:
    """What is started here; see the module. Arguments: `stay FOLDER ...` or `join FOLDER HOST`."""
    role, *arguments = sys.argv[1:]
    if role == "stay":
        _stay([Path(argument) for argument in arguments])
        return 0
    return _join(Path(arguments[0]), arguments[1])


def _stay(folders: list[Path]) -> None:
    """Live until the launcher is over, whatever signal Slurm or a terminal sends to all at once."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # this is not to outlive the agent's there
    while os.read(0, 1024):
        pass
    # Nobody else does it after a SIGKILL. The agent ends only after this process, and some file systems of a
    # network keep its socket until then.
    if os.fork() == 0:
        _remove(*folders)


def _join(folder: Path, first: str) -> int:
    """Be the agent of another node until the run is over; the exit code."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # of `sbatch --signal`, which is not for agents
        signal.signal(number, lambda number, frame: None)  # ranks would inherit that they are ignored
    own_host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if not folder.is_dir():
        print(
            f"carme-agent: {own_host} does not see the folder {folder} of {first}. "
            "Name one that all nodes of the job see: --shared-folder DIR",
            file=sys.stderr,
        )
        return 1
    place = folder / own_host
    try:
        place = _place(folder, own_host)
        certificate = folder / CERTIFICATE
        options = Namespace(key_file=folder / KEY, socket=place / SOCKET)
        options.certificate = certificate if certificate.exists() else None
        where = json.loads((folder / ANNOUNCED).read_text())
        options.join = f"{where['host']}:{where['port']}"
        code = service.join(options, END_SECONDS)
        if code == service.LOST and _is_over(where["host"], where["port"]):
            _remove(folder)
        return code
    except (CarmeRuntimeError, OSError, ValueError) as error:
        print(f"carme-agent: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _is_over(host: str, port: int) -> bool:
    """Whether the first agent has ended, as when Slurm kills all that a job's script started.

    Then nobody there removes the folder. A first agent that lives, or a node that does not answer, may have a
    run that goes on without this node.
    """
    for _ in range(20):
        try:
            socket.create_connection((host, port), END_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        time.sleep(POLL_SECONDS)
    return False
