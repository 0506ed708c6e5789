"""What a large site costs the broker: 500 nodes and 5,000 jobs of 1,000 users, and ten times as much.

    ./test bench scale --quick
    ./test bench scale --json result.json

Real: the broker as its own process (`carme-broker`), its socket, and all that it does with what Slurm says.
Not real: Slurm. Programs in place of squeue, scontrol, sacct, sacctmgr and sinfo print what Slurm's own
would print at that size, from files; what slurmctld and Slurm's programs would need for it is not
measured. A tenth of the jobs runs, and the jobs are those of a site on which most work is not Carme's: one in
a hundred is a session. Twice a second one of the waiting jobs begins, as on a site at work.

Rows, each at the small size with the large one beside it: `snapshot_s`, until the first poll is over;
`broker_cpu_percent` of one core, without the programs; `broker_memory_mb`, the most that was resident;
`change_seen_s`, the slowest of some changes until a client that waits for events knows of them.
`portal_p95_ms` and `calendar_p95_ms` come from the portal's benchmark (`./test bench portal`) at these sizes,
with bookings of a year: the slowest of its pages and endpoints but for the calendar, which is named, and the
calendar's page. `prometheus_targets_s`: until Prometheus has read every node once (`prometheus_targets.py`).
Rows that begin with `slurmds_` come from 50 and 500 real slurmds, as root on a host with Slurm's programs and
munge (`virtual_slurmds.py`); elsewhere they are left out.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus_targets
import virtual_slurmds
from measured_broker import SEEN_SECONDS, broker, first_poll
from report import growth_row, machine, print_table, tidy_up_when_ended, write_json

from carme.broker import AsyncBrokerClient
from carme.errors import CarmeError
from carme.slurm.parsing import QUEUE_FIELDS
from carme.slurm.tres import ALLOTTED_FIELDS

#: Nodes, users and jobs.
SMALL, LARGE = (500, 1_000, 5_000), (5_000, 10_000, 50_000)
CPU_PERCENT, MEMORY_MB, P95_MS = 30.0, 500.0, 150.0
CHANGES = 5
#: Jobs that may begin while it is measured.
MOVING = 400
#: Stands for Slurm's programs: prints a file with the separator that was requested.
PROGRAM = """#!/bin/sh
cd {folder}
case "${{0##*/}} $* $SQUEUE_FORMAT2 $SQUEUE_FORMAT" in
  "scontrol "*" show job") exec cat jobs jobs.moving ;;
  "scontrol "*" show node") exec cat nodes ;;
  "scontrol "*" show partition") exec cat partitions ;;
  "squeue --helpFormat"*) echo "JobID OverSubscribe tres-alloc"; exit ;;
  "squeue "*" JobID:"*) file=long; separator=${{SQUEUE_FORMAT2#JobID:}} ;;
  "squeue "*" %A"*) file=short; separator=${{SQUEUE_FORMAT#%A}} ;;
  *) exit ;;
esac
separator=${{separator%%[,%]*}}
exec sed "s/\\x1f/$separator/g" "$file" "$file.moving"
"""


@dataclass
class Measured:
    """What one size cost."""

    snapshot: float
    cpu: float
    memory: float
    seen: float


class Site:
    """The files from which the programs print.

    Args:
        folder: Of the programs and files; other accounts need not read it.
        size: Nodes, users and jobs.
    """

    def __init__(self, folder: Path, size: tuple[int, int, int]) -> None:
        self.folder = folder
        self.nodes, self.users, self.count = size
        self._begun = int(time.time()) - 3600
        self.running = set(range(1, self.count // 10 + 1))
        self._moving = range(self.count // 10 + 1, self.count // 10 + 1 + MOVING)
        program = PROGRAM.format(folder=folder)
        for name in ("squeue", "scontrol", "sacct", "sacctmgr", "sinfo", "scancel", "sbatch"):
            (folder / name).write_text(program)
            (folder / name).chmod(0o755)
        self._write("nodes", "".join(self._node(number) for number in range(self.nodes)))
        self._write(
            "partitions",
            "PartitionName=gpu AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00 "
            f"Nodes=n[0-{self.nodes - 1}] State=UP TotalCPUs={self.nodes * 128}\n",
        )
        self._write_jobs("", (number for number in range(1, self.count + 1) if number not in self._moving))
        self._write_jobs(".moving", self._moving)

    def begin(self) -> int:
        """Let a waiting job begin; its number."""
        number = next(number for number in self._moving if number not in self.running)
        self.running.add(number)
        self._write_jobs(".moving", self._moving)
        return number

    def _write_jobs(self, ending: str, numbers: Iterable[int]) -> None:
        """Write jobs as each of the programs prints them; last what the broker looks for changes in."""
        texts = zip(*map(self._record, numbers), strict=True)
        for name, lines in zip(("short", "long", "jobs"), texts, strict=True):
            self._write(f"{name}{ending}", "".join(lines))

    def _write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.new").write_text(text)
        (self.folder / f"{name}.new").rename(self.folder / name)

    def _record(self, number: int) -> tuple[str, str, str]:
        """A job in squeue's short and long form, and in scontrol's."""
        runs = number in self.running
        user, node = f"user{number % self.users}", f"n{number % self.nodes}"
        start = self._begun if runs else self._begun + 90_000
        key = f"{number:032x}"
        comment = f"carme/1 kind=session image=torch key={key}" if number % 100 == 0 else ""
        short = {
            "A": number, "u": user, "a": f"account{number % 50}", "P": "gpu", "D": 1, "C": 8,
            "T": "RUNNING" if runs else "PENDING", "r": "None" if runs else "Priority",
            "N": node if runs else "", "b": "gres/gpu:a100:1", "m": "64000M", "l": "10:00:00",
            "L": "9:00:00" if runs else "10:00:00", "V": self._begun - 60, "S": start, "e": start + 36_000,
            "Q": 4_000_000 - number, "Y": "" if runs else "(null)", "v": "(null)", "q": "normal",
            "B": node if runs else "n/a", "F": number, "K": "N/A", "j": f"train {number % 97}", "k": comment,
        }  # fmt: skip
        tres = "cpu=8,mem=64000M,node=1,billing=8,gres/gpu=1,gres/gpu:a100=1"
        long = {"JobID": number, "RestartCnt": 0, "NumNodes": 1, "NumTasks": 1, "tres-alloc": tres}
        long |= {"tres-per-node": "gres/gpu:a100:1", "OverSubscribe": "OK"}
        shown = (
            f"JobId={number} JobName={short['j']} UserId={user}({number % self.users + 10_000}) "
            f"GroupId=users(100) MCS_label=N/A Priority={short['Q']} Nice=0 Account={short['a']} QOS=normal "
            f"JobState={short['T']} Reason={short['r']} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
            f"Reboot=0 ExitCode=0:0 RunTime={'01:00:00' if runs else '00:00:00'} TimeLimit=10:00:00 "
            f"TimeMin=N/A SubmitTime={short['V']} EligibleTime={short['V']} AccrueTime={short['V']} "
            f"StartTime={start} EndTime={short['e']} Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
            "LastSchedEval=2026-11-27T00:00:00 Scheduler=Backfill Partition=gpu AllocNode:Sid=login:4711 "
            f"ReqNodeList=(null) ExcNodeList=(null) NodeList={short['N']} NumNodes=1 NumCPUs=8 NumTasks=1 "
            f"CPUs/Task=8 ReqB:S:C:T=0:0:*:* ReqTRES={tres} AllocTRES={tres} Socks/Node=* "
            "NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=8 MinMemoryNode=64000M MinTmpDiskNode=0 "
            "Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) "
            f"Command=/home/{user}/work/run.sh WorkDir=/home/{user}/work Comment={comment} "
            f"StdErr=/home/{user}/work/slurm-{number}.out StdIn=/dev/null "
            f"StdOut=/home/{user}/work/slurm-{number}.out TresPerNode=gres/gpu:a100:1\n"
        )
        fields = (*ALLOTTED_FIELDS, "OverSubscribe")
        return (
            "".join(f"{short[field]}\x1f" for field in QUEUE_FIELDS) + "\n",
            "".join(f"{long.get(field, 'N/A')}\x1f" for field in fields) + "\n",
            shown,
        )

    @staticmethod
    def _node(number: int) -> str:
        return (
            f"NodeName=n{number} Arch=x86_64 CPUAlloc=8 CPUEfctv=128 CPUTot=128 AvailableFeatures=a100,ib "
            "ActiveFeatures=a100,ib Gres=gpu:a100:8(S:0-1) GresDrain=N/A GresUsed=gpu:a100:1(IDX:0) "
            f"NodeAddr=n{number} NodeHostName=n{number} OS=Linux 6.1 #1 SMP "
            "RealMemory=1000000 AllocMem=64000 Sockets=2 State=MIXED ThreadsPerCore=1 Partitions=gpu\n"
        )


async def measure(size: tuple[int, int, int], seconds: float) -> Measured:
    """What the broker needs for a site of that size."""
    folder = Path(tempfile.mkdtemp(prefix="carme-scale-bench-"))
    try:
        site = Site(folder, size)
        begun = time.monotonic()
        with broker(folder) as process:
            client = AsyncBrokerClient(folder / "broker.sock")
            try:
                await first_poll(client, process)
            except CarmeError as error:
                sys.exit(f"scale: {error}\n{(folder / 'journal').read_text()[-2000:]}")
            snapshot = time.monotonic() - begun
            used, begun = _cpu(process.pid), time.monotonic()
            stop = asyncio.Event()
            rest = asyncio.create_task(_work(site, stop))
            await asyncio.sleep(seconds)
            percent = (_cpu(process.pid) - used) / (time.monotonic() - begun) * 100
            stop.set()
            await rest
            seen = [await _seen(site, client) for _ in range(CHANGES)]
            return Measured(snapshot, percent, _peak(process.pid), max(seen))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _work(site: Site, stop: asyncio.Event) -> None:
    """Let jobs begin, as on a site at work."""
    while not stop.is_set():
        await asyncio.to_thread(site.begin)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)


async def _seen(site: Site, client: AsyncBrokerClient) -> float:
    """Seconds until a client knows that a job has begun."""
    cursor = (await client.events()).cursor
    await asyncio.sleep(random.uniform(0, 2))  # at any moment between two polls
    number = await asyncio.to_thread(site.begin)
    begun = time.monotonic()
    while time.monotonic() < begun + 120:
        events = await client.events(cursor, wait=10)
        cursor = events.cursor
        if any(job.id == number and job.is_running for job in events.jobs):
            return time.monotonic() - begun
    return 120.0


def measure_portal(size: tuple[int, int, int], seconds: float) -> tuple[float, float, str]:
    """The portal's slowest page and its calendar at that size: 95th percentiles, in ms; that page's name."""
    nodes, users, jobs = size
    with tempfile.TemporaryDirectory(prefix="carme-scale-bench-") as folder:
        report = Path(folder, "portal.json")
        sizes = {"nodes": nodes, "users": users, "current": jobs, "past": 2 * jobs, "bookings": 2 * users}
        subprocess.run(
            [
                *[sys.executable, str(Path(__file__).with_name("portal.py")), "--year", f"--json={report}"],
                *[f"--seconds={seconds}", *(f"--{name}={count}" for name, count in sizes.items())],
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        rows = {row["name"]: row["ours"] for row in json.loads(report.read_text())["aims"]}
    calendar = rows.pop("calendar_p95_ms")
    slowest, name = max((value, name) for name, value in rows.items() if name.endswith("_p95_ms"))
    return slowest, calendar, name.removesuffix("_p95_ms")


def _cpu(pid: int) -> float:
    """Processor seconds of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def judge(small: Measured, large: Measured) -> list[dict[str, Any]]:
    """The broker's rows of the report."""
    return [
        growth_row("snapshot_s", "s", small.snapshot, large.snapshot),
        growth_row("broker_cpu_percent", "%", small.cpu, large.cpu, CPU_PERCENT),
        growth_row("broker_memory_mb", "MiB", small.memory, large.memory, MEMORY_MB),
        growth_row("change_seen_s", "s", small.seen, large.seen, SEEN_SECONDS),
    ]


def judge_portal(small: tuple[float, float, str], large: tuple[float, float, str]) -> list[dict[str, Any]]:
    """The portal's rows of the report."""
    return [
        growth_row("portal_p95_ms", "ms", small[0], large[0], P95_MS, slowest=large[2]),
        growth_row("calendar_p95_ms", "ms", small[1], large[1], P95_MS, slowest="calendar"),
    ]


def judge_prometheus(small: float | None, large: float | None) -> list[dict[str, Any]]:
    """Prometheus's row of the report; none where it is not installed."""
    if small is None or large is None:
        return []
    return [growth_row("prometheus_targets_s", "s", small, large, 2 * prometheus_targets.SCRAPE_SECONDS)]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="15 seconds in place of 60")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument(
        "--only", choices=("broker", "portal", "prometheus", "slurmds"), help="in place of all"
    )
    options = parser.parse_args()
    tidy_up_when_ended()
    before, seconds = machine(), 15.0 if options.quick else 60.0
    rows, measured = [], []
    for size in (SMALL, LARGE) if options.only in (None, "broker") else ():
        measured.append(asyncio.run(measure(size, seconds)))
        shown = f"{size[0]} nodes, {size[1]} users, {size[2]} jobs: {measured[-1]}"
        print(shown, file=sys.stderr, flush=True)
    if measured:
        rows += judge(*measured)
    if options.only in (None, "prometheus"):
        rows += judge_prometheus(*(prometheus_targets.measure(size[0]) for size in (SMALL, LARGE)))
    if options.only in (None, "portal"):
        rows += judge_portal(*(measure_portal(size, seconds) for size in (SMALL, LARGE)))
    if options.only in (None, "slurmds"):
        rows += virtual_slurmds.rows()
    print(f"Load before {before['load']}.")
    print_table(rows)
    if options.json:
        write_json(options.json, rows, before=before, quick=options.quick, seconds=seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
