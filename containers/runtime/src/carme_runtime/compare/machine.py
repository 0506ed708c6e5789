"""The machine: what it is, how busy its cores are, and a probe of known work."""

import contextlib
import hashlib
import os
import platform
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: The variable of all processes of a contestant's entry, which its ranks and its servers get.
ENTRY = "CARME_COMPARE_ENTRY"
ALONE, SHARED, UNKNOWN = "alone on its nodes", "shares its nodes", "not known"
_STAT = Path("/proc/stat")
_NODES = Path("/sys/devices/system/node")
_SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
_CORES_OF_NODES = re.compile(r"(\d+)(?:\(x\d+\))?")  # as Slurm writes them: 64(x2),32
_PROBE = bytes(4 << 20)
_PROBE_TIMES = 4
_SERVERS = {b"DMLC_ROLE=server", b"DMLC_ROLE=scheduler"}  # MXNet's; the programs that start all have none
_IDLE = (3, 4)  # columns of /proc/stat: idle, waiting for a disk; guests count as users already
_COLUMNS = 8


def busy_seconds(cores: Iterable[int]) -> float | None:
    """How long these cores have been busy or stolen since the machine started; None: unknown."""
    names = {f"cpu{number}" for number in cores}
    try:
        rows = [line.split() for line in _STAT.read_text().splitlines()]
        ticks = os.sysconf("SC_CLK_TCK")
        found = [
            sum(int(value) for column, value in enumerate(row[1 : 1 + _COLUMNS]) if column not in _IDLE)
            for row in rows
            if row and row[0] in names
        ]
    except (OSError, ValueError):
        return None
    return sum(found) / ticks if len(found) == len(names) else None


def companions() -> list[int]:
    """The processes on this node that serve the ranks of this process's entry, such as a parameter server.

    They have the entry's variables, and a role that is no rank's. Without /proc there are none.
    """
    own = {f"{name}={os.environ.get(name)}".encode() for name in (ENTRY, "CARME_COMPARE_SECRET")}
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # of other users, or gone
            variables = (folder / "environ").read_bytes().split(b"\0")
            if own <= set(variables) and _SERVERS & set(variables):
                found.append(int(folder.name))
    return found


def used_seconds(processes: Iterable[int]) -> float:
    """The processor time of these processes so far; one that is gone has none."""
    ticks = 0
    for number in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The second field may hold spaces and brackets.
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def probe(cores: Iterable[int]) -> float:
    """Milliseconds that the same work takes on each of these cores at once; the slowest counts."""
    times: list[float] = []

    def work(core: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})  # of this thread alone
        hashlib.sha256(_PROBE[: 1 << 16]).digest()
        begin = time.perf_counter()
        for _ in range(_PROBE_TIMES):
            hashlib.sha256(_PROBE).digest()
        times.append(1000 * (time.perf_counter() - begin))

    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(times)


def peak_bytes() -> int:
    """The most memory that this process has had at once; 0: unknown."""
    return _kilobytes(_field(Path("/proc/self/status"), "VmHWM"))


def environment() -> dict[str, Any]:
    """Processor, cores, memory, system, clocks: what a reader has to know of the machine."""
    return {
        "host": platform.node(),
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_of_a_core": _threads_of_a_core(),
        "numa_nodes": len([*_NODES.glob("node[0-9]*")]) or 1,
        "memory_bytes": _kilobytes(_field(Path("/proc/meminfo"), "MemTotal")),
        "kernel": platform.release(),
        "system": _field(Path("/etc/os-release"), "PRETTY_NAME", "=").strip('"'),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "governor": _first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "allocation": allocation(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "nodes": os.environ.get("SLURM_JOB_NODELIST", ""),
    }


def allocation() -> str:
    """Whether others may work on the nodes meanwhile, by the cores that the job has of them.

    A job that has all cores is alone as long as Slurm does not oversubscribe them. Nodes other than the first
    are taken to have as many cores as that. Where Slurm counts cores and the kernel their threads, a part of
    the kernel's count may be all; and outside of jobs nobody gives cores away.
    """
    present, own = os.cpu_count() or 0, len(os.sched_getaffinity(0))
    text = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    in_job = bool(os.environ.get("SLURM_JOB_ID"))
    granted = [int(found) for found in _CORES_OF_NODES.findall(text)] if in_job else []
    least = min([*granted, own])
    if granted and min(granted) >= present > 0:
        return ALONE
    if 0 < least < present and (not granted or least != present // _threads_of_a_core()):
        return f"{SHARED}: {least} of {present} cores"
    return UNKNOWN


def _threads_of_a_core() -> int:
    """How many of the cores that the kernel counts are one in the processor; 1: also where nobody knows."""
    siblings = _first_line(_SIBLINGS)
    parts = [part.partition("-") for part in siblings.split(",")]
    counts = [int(last) - int(first) + 1 if last else 1 for first, _, last in parts if first.isdigit()]
    return sum(counts) or 1


def _field(file: Path, name: str, separator: str = ":") -> str:
    try:
        for line in file.read_text().splitlines():
            key, found, value = line.partition(separator)
            if found and key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


def _kilobytes(text: str) -> int:
    number = text.split()[0] if text else ""
    return 1024 * int(number) if number.isdigit() else 0


def _first_line(file: Path) -> str:
    try:
        return file.read_text().split("\n")[0]
    except OSError:
        return ""
