"""How the broker reads a Slurm with hundreds of real slurmds, all of them on this machine (`slurmd -N`).

    sudo ./test bench scale --only slurmds

Real: slurmctld, the slurmds, munge and Slurm's programs of this machine's packages, with a configuration of
their own beside any other Slurm; the broker as its own process. As root, on a host where the ports from 26817
on are free (a network namespace of its own needs an interface besides loopback). Not real: what nodes have
(4 processors and 1,000 MB each, whatever the machine has), and the accounting; there is none: sacct
and sacctmgr print nothing.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
from measured_broker import SEEN_SECONDS, broker, first_poll
from report import growth_row

from carme.broker import AsyncBrokerClient
from carme.errors import CarmeError
from carme.slurm import SlurmCommands

#: How many slurmds, and a tenth of them.
SMALL, LARGE = 50, 500
PROGRAMS = ("slurmctld", "slurmd", "munged", "squeue", "scontrol", "sbatch")
#: Ports of the controller and of the first node.
CONTROLLER, FIRST = 26_817, 27_001
#: Seconds for all nodes to register.
PATIENCE = 600.0
POLLS, CHANGES = 21, 5
CONFIGURATION = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/pid/%n
SlurmdLogFile={folder}/log/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=600
MessageTimeout=60
MpiDefault=none
NodeName=v[1-{count}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Measured:
    """What such a Slurm costs; times in seconds, memory in MiB.

    Attributes:
        register: Until all nodes were there.
        snapshot: Until the broker's first poll was over.
        poll: One poll of the adapter at nodes and partitions, in the median.
        seen: The slowest of some changes until a client that waits for events knew of them.
        slurmd: What one of the slurmds has in memory for itself, in the mean.
    """

    register: float
    snapshot: float
    poll: float
    seen: float
    slurmd: float


def missing() -> list[str]:
    """What is not installed here."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def slurm(folder: Path, count: int) -> Iterator[float]:
    """A Slurm with so many nodes, from when all are there until the block ends; the seconds that took."""
    for name in ("state", "spool", "pid", "log"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    names = {"folder": folder, "count": count, "host": socket.gethostname().split(".")[0]}
    ports = {"controller": CONTROLLER, "first": FIRST, "last": FIRST + count - 1}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**names, **ports))
    (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "output").open("wb") as output:

        def start(*command: str) -> None:
            started.append(subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL))

        try:
            options = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
            options |= {"log-file": "munge.log", "seed-file": "munge.seed"}
            paths = [f"--{option}={folder / name}" for option, name in options.items()]
            start("munged", "--foreground", "--force", *paths)
            begun = time.monotonic()
            while not (folder / "munge.socket").exists():
                _wait(begun, started, folder)
            begun = time.monotonic()
            start("slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf"))
            for number in range(1, count + 1):
                start("slurmd", "-D", "-N", f"v{number}", "-f", str(folder / "slurm.conf"))
            while _idle() < count:
                _wait(begun, started, folder)
            yield time.monotonic() - begun
        finally:
            for process in reversed(started):  # munge last, which the others need
                process.terminate()
            for process in reversed(started):
                processes.end(process)


def _wait(begun: float, started: "list[subprocess.Popen[bytes]]", folder: Path) -> None:
    """A moment of it.

    Raises:
        CarmeError: Something has ended, or it takes too long.
    """
    ended = [process for process in started if process.poll() is not None]
    if ended or time.monotonic() > begun + PATIENCE:
        logs = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
        words = f"{ended[0].args} has ended" if ended else f"{_idle()} nodes are there after {PATIENCE:.0f} s"
        raise CarmeError(f"{words}. {(folder / 'output').read_text(errors='replace')[-1000:]}{logs}", "")
    time.sleep(0.2)


def _idle() -> int:
    """How many nodes are there, by the controller."""
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # A star after the state says that a node does not answer; such are not listed as idle.
    return sum(int(word) for word in done.stdout.split() if word.isdecimal())


async def measure(count: int) -> Measured:
    """What a Slurm of so many nodes costs."""
    folder = Path(tempfile.mkdtemp(prefix="carme-slurmds-"))
    try:
        with slurm(folder, count) as register:
            pids = [int((folder / f"pid/v{number}").read_text()) for number in range(1, count + 1)]
            memory = statistics.mean(map(_private_mib, pids))
            poll = await _poll_seconds(count)
            for name in ("sacct", "sacctmgr"):
                (folder / name).write_text("#!/bin/sh\n")
                (folder / name).chmod(0o755)
            begun = time.monotonic()
            with broker(folder) as process:
                client = AsyncBrokerClient(folder / "broker.sock")
                await first_poll(client, process)
                snapshot = time.monotonic() - begun
                seen = [await _seen(client) for _ in range(CHANGES)]
            return Measured(register, snapshot, poll, max(seen), memory)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _poll_seconds(count: int) -> float:
    commands, took = SlurmCommands(cluster="bench"), []
    for _ in range(POLLS):
        begun = time.perf_counter()
        cluster = await commands.cluster()
        took.append(time.perf_counter() - begun)
        assert len(cluster.nodes) == count
    return statistics.median(took)


async def _seen(client: AsyncBrokerClient) -> float:
    """Seconds from when a job runs until a client knows it, with what Slurm takes to start it."""
    cursor = (await client.events()).cursor
    begun = time.monotonic()
    command = ["sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 30"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    number = int(done.stdout.split(";")[0])
    while time.monotonic() < begun + 120:
        events = await client.events(cursor, wait=10)
        cursor = events.cursor
        if any(job.id == number and job.is_running for job in events.jobs):
            return time.monotonic() - begun
    return 120.0


def _private_mib(pid: int) -> float:
    """What a process has in memory that it shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def rows() -> list[dict[str, Any]]:
    """The rows of the report; none where such a Slurm cannot be made, which is printed."""
    absent = missing()
    if absent or os.geteuid() != 0:
        need = f"{', '.join(absent)} must be installed" if absent else "root is needed"
        print(f"scale: {need}; the rows of slurmds are left out.", file=sys.stderr)
        return []
    try:
        return judge(*(asyncio.run(measure(count)) for count in (SMALL, LARGE)))
    except CarmeError as error:
        # The rows that were measured before are worth more than an end with an error.
        print(f"scale: the rows of slurmds are left out: {error}", file=sys.stderr)
        return []


def judge(small: Measured, large: Measured) -> list[dict[str, Any]]:
    """The rows of both sizes."""
    return [
        growth_row("slurmds_snapshot_s", "s", small.snapshot, large.snapshot),
        growth_row("slurmds_look_ms", "ms", 1000 * small.poll, 1000 * large.poll),
        growth_row("slurmds_change_seen_s", "s", small.seen, large.seen, SEEN_SECONDS),
        growth_row("slurmds_register_s", "s", small.register, large.register),
        growth_row("slurmds_memory_mb_each", "MiB", small.slurmd, large.slurmd),
    ]
