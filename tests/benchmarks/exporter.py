"""What the exporter of a busy node costs: 8 GPUs, 128 jobs, 4,000 processes, a scrape every 15 s.

    sudo ./test bench exporter --quick
    sudo ./test bench exporter --json result.json

Real: the exporter as a process of its own, scraped over HTTP on loopback; 4,000 sleeping processes of 128
users, in control groups that the kernel keeps (rows `... v1` or `... v2`, whichever this host has).
Simulated: the GPUs' library (tests/simulated_nvml.c, with 64 processes on each GPU), the prolog's records,
and where the host has no version 2 of control groups with controllers, files as the kernel writes them
(rows `... v2 files`): these show what the exporter itself costs there, and not what the kernel takes to
answer.

Row `cluster_2000_nodes_s`: one scrape of the cluster exporter, a process of its own as well, beside a broker
that knows 2,000 nodes and 10,000 jobs. The broker is simulated: a socket in this process that makes and sends
the answer as the real one does, from a snapshot that no Slurm gave.

Peers: node_exporter with the same processes on the host, which knows nothing of jobs and GPUs, and a
program that asks the simulated library as nvidia-smi would, started for each look: neither does what is
measured beside it. Processor time is each process's own (with what it starts), so that what else the machine
does is not counted; the time of a scrape is not free of that. `load` in the JSON says how busy the machine
was. Needs root.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import simulated_gpus
from cluster_snapshot import site
from free_ports import free_port
from report import print_table, row, write_json
from simulated_broker import SimulatedBroker, configuration

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GPUS, JOBS, PROCESSES = 8, 128, 4000
NODES, QUEUED = 2000, 10_000  # of the whole cluster
EVERY = 15.0  # seconds between two scrapes, for the share of a core
STEPS = ("batch", "0")
CGROUPS = Path("/sys/fs/cgroup")
V1_CONTROLLERS = ("memory", "cpuacct", "devices", "blkio", "pids", "freezer")
FIRST_JOB, FIRST_USER = 900_000, 60_000

_MEMORY = """anon file kernel kernel_stack pagetables sec_pagetables percpu sock vmalloc shmem zswap zswapped
file_mapped file_dirty file_writeback swapcached anon_thp file_thp shmem_thp inactive_anon active_anon
inactive_file active_file unevictable slab_reclaimable slab_unreclaimable slab workingset_refault_anon
workingset_refault_file workingset_activate_anon workingset_activate_file pgfault pgmajfault"""
_STAT = "".join(f"{name} {1000 * place}\n" for place, name in enumerate(_MEMORY.split()))
#: What version 2 shows of a group, as files where there is no such kernel.
_V2_FILES = {
    "cpu.stat": "usage_usec 3500000\nuser_usec 3000000\nsystem_usec 500000\nnice_usec 0\n"
    "nr_periods 0\nnr_throttled 0\nthrottled_usec 0\nnr_bursts 0\nburst_usec 0\n",
    "memory.current": "104857600\n",
    "memory.peak": "209715200\n",
    "memory.max": "524288000\n",
    "memory.stat": _STAT,
    "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n",
    "io.stat": "8:0 rbytes=100 wbytes=20 rios=1 wios=1 dbytes=0 dios=0\n",
    "cgroup.threads": "",
}


class Node:
    """The simulated node: control groups, records, GPUs, and processes as `populate` says.

    Args:
        folder: Where records, files and programs lie.
        layout: `v1` or `v2` of the kernel, or `v2 files`.
    """

    def __init__(self, folder: Path, layout: str) -> None:
        self.layout, self._folder = layout, folder
        self.cgroups = folder / "cgroup" if layout == "v2 files" else CGROUPS
        self.records, self.gpus = folder / "allocations", folder / "gpus"
        self._groups: dict[tuple[int, str], list[Path]] = {}
        self._sleepers: list[subprocess.Popen[str]] = []
        self._folders: list[Path] = []

    def __enter__(self) -> "Node":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._empty()
        # Children before parents; the kernel takes its time for each, so many at once.
        with ThreadPoolExecutor(32) as threads:
            for depth in sorted({len(group.parts) for group in self._folders}, reverse=True):
                list(threads.map(_remove, (group for group in self._folders if len(group.parts) == depth)))
        shutil.rmtree(self.records, ignore_errors=True)
        shutil.rmtree(self._folder / "cgroup", ignore_errors=True)

    def populate(self, processes: int) -> None:
        """So many processes in all jobs together, instead of those that there were."""
        self._empty()
        share, rest = divmod(processes, len(self._groups))
        users: dict[int, list[int]] = {}
        for number, ((place, _), groups) in enumerate(self._groups.items()):
            pids = self._start(FIRST_USER + place, share + (number < rest), groups)
            users.setdefault(place % GPUS, []).extend(pids)
        lines = []
        for gpu in range(GPUS):
            on_it = users[gpu][:: max(1, len(users[gpu]) // 64)]
            lines.append(
                f"gpu uuid=GPU-{gpu} minor={gpu} util=50 used=40000 power=300 energy=5000 temp=60 tensor=40 "
                f"pids={','.join(f'{pid}:100' for pid in on_it)}\n"
            )
        self.gpus.write_text("".join(lines))

    def _empty(self) -> None:
        for sleeper in self._sleepers:
            sleeper.kill()
        for sleeper in self._sleepers:
            sleeper.wait()
            if sleeper.stdout:
                sleeper.stdout.close()
        self._sleepers = []

    def _make(self) -> None:
        subprocess.run(["cc", "-O1", "-o", self._folder / "sleepers", HERE / "sleepers.c"], check=True)
        self.records.mkdir()
        if self.layout == "v2 files":
            self.cgroups.mkdir()
            (self.cgroups / "cgroup.controllers").write_text("cpu io memory pids\n")
        for place in range(JOBS):
            job, uid = FIRST_JOB + place, FIRST_USER + place
            record = {"user": f"bench{place}", "account": f"account{place % 16}", "partition": "gpu"}
            record |= {"gpus": str(place % GPUS), "cpus": "2"}
            (self.records / f"{job}.json").write_text(json.dumps(record))
            for step in STEPS:
                if self.layout == "v1":
                    path = f"slurm_bench{os.getpid()}/uid_{uid}/job_{job}/step_{step}"
                    roots = [CGROUPS / controller for controller in V1_CONTROLLERS]
                else:
                    path = f"bench{os.getpid()}_slurmstepd.scope/job_{job}/step_{step}/user/task_0"
                    roots = [self.cgroups]
                self._groups[place, step] = [self._group(root, path) for root in roots]

    def _start(self, uid: int, count: int, groups: list[Path]) -> list[int]:
        """So many processes in these groups; their numbers."""
        joined = [] if self.layout == "v2 files" else [str(group / "cgroup.procs") for group in groups]
        sleepers = subprocess.Popen(
            [self._folder / "sleepers", str(uid), str(count), *joined], stdout=subprocess.PIPE, text=True
        )
        self._sleepers.append(sleepers)
        assert sleepers.stdout is not None
        pids = []
        while line := sleepers.stdout.readline().strip():
            pids.append(int(line))
        if len(pids) != count:
            raise RuntimeError(f"Only {len(pids)} of {count} processes could be started.")
        if self.layout == "v2 files":
            for name in ("cgroup.procs", "cgroup.threads"):
                (groups[0] / name).write_text("".join(f"{pid}\n" for pid in pids))
        return pids

    def _group(self, root: Path, path: str) -> Path:
        group = root
        for part in path.split("/"):
            parent, group = group, group / part
            if group.exists():
                continue
            if self.layout == "v2":
                (parent / "cgroup.subtree_control").write_text("+cpu +memory +io +pids")
            group.mkdir()
            self._folders.append(group)
            if self.layout == "v2 files":
                for name, text in _V2_FILES.items():
                    (group / name).write_text(text)
                (group / "cgroup.procs").write_text("")
        return group


def _remove(group: Path) -> None:
    for _ in range(200):  # its processes have been ended, which takes a moment
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)


@dataclass
class Cost:
    """Of one scrape: milliseconds (median), processor milliseconds; MiB, series, bytes of an answer."""

    scrape_ms: float
    cpu_ms: float
    memory_mb: float = 0.0
    series: int = 0
    answer_bytes: int = 0

    @property
    def share(self) -> float:
        """Per cent of one core at one scrape every `EVERY` seconds."""
        return self.cpu_ms / (EVERY * 1000) * 100


def _processor_seconds(pid: int) -> float:
    # The processor-time clock of another process: clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def running(command: list[str | Path], environment: dict[str, str], url: str) -> Iterator[int]:
    """A server, until it answers; its number."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {process.returncode}.")
            with contextlib.suppress(OSError):
                _get(url)
                break
            time.sleep(0.1)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def measure(pid: int, url: str, rounds: int) -> Cost:
    """Scrape so often, after two scrapes that warm up."""
    answer = b""
    for _ in range(2):
        answer = _get(url)
    times = []
    begun = _processor_seconds(pid)
    for _ in range(rounds):
        start = time.perf_counter()
        _get(url)
        times.append((time.perf_counter() - start) * 1000)
        time.sleep(0.05)
    cpu = (_processor_seconds(pid) - begun) / rounds * 1000
    status = Path(f"/proc/{pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    series = sum(1 for line in answer.splitlines() if line and not line.startswith(b"#"))
    return Cost(statistics.median(times), cpu, peak, series, len(answer))


def carme(node: Node, library: Path, rounds: int) -> Cost:
    """The exporter on that node."""
    port = free_port()
    command: list[str | Path] = [
        sys.executable, "-m", "carme_monitoring.node.exporter", "--listen", f"127.0.0.1:{port}",
        "--allocations", node.records, "--cgroups", node.cgroups,
    ]  # fmt: skip
    environment = _environment() | {
        "LD_LIBRARY_PATH": str(library.parent),
        "SIMULATED_NVML": str(node.gpus),
    }
    url = f"http://127.0.0.1:{port}/metrics"
    with running(command, environment, url) as pid:
        cost = measure(pid, url, rounds)
        text = _get(url).decode()
    jobs = text.count("carme_job_info{")
    if jobs < JOBS:
        raise RuntimeError(f"The exporter shows {jobs} of {JOBS} jobs.")
    return cost


def cluster(folder: Path, rounds: int) -> Cost:
    """The cluster exporter beside a broker of a large site."""
    address = folder / "broker.sock"
    file = configuration(folder, address)
    port = free_port()
    command: list[str | Path] = [
        sys.executable, "-m", "carme_monitoring.cluster.exporter", "--listen", f"127.0.0.1:{port}",
        "--config", file,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        SimulatedBroker(address, site(NODES, QUEUED)),
        running(command, _environment(), url) as pid,
    ):
        cost = measure(pid, url, rounds)
        text = _get(url).decode()
    if text.count("carme_node_available{") != NODES:
        raise RuntimeError(f"The cluster exporter does not show {NODES} nodes.")
    return cost


def _environment() -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}",
    }


def node_exporter(rounds: int) -> Cost | None:
    """Debian's node_exporter at its defaults, on this host; None where it is not there."""
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if not program:
        return None
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with running(
        [program, f"--web.listen-address=127.0.0.1:{port}"], {"PATH": os.environ["PATH"]}, url
    ) as pid:
        return measure(pid, url, rounds)


def started_program(node: Node, library: Path, folder: Path, rounds: int) -> Cost:
    """A program that is started for each look, as many monitors start nvidia-smi, and what it says, read."""
    program = folder / "smi"
    subprocess.run(["cc", "-O1", "-o", program, HERE / "smi.c", library], check=True)
    environment = {"LD_LIBRARY_PATH": str(library.parent), "SIMULATED_NVML": str(node.gpus)}
    times = []
    before = os.times()
    for _ in range(rounds):
        start = time.perf_counter()
        done = subprocess.run([program], env=environment, capture_output=True, check=True, text=True)
        [line.split(", ") for line in done.stdout.splitlines()]
        times.append((time.perf_counter() - start) * 1000)
    after = os.times()
    spent = sum(after[place] - before[place] for place in range(4)) / rounds * 1000
    return Cost(statistics.median(times), spent)


def layouts() -> list[str]:
    """What this host can show."""
    if (CGROUPS / "cgroup.controllers").exists():
        return ["v2"]
    return ["v1", "v2 files"] if (CGROUPS / "memory").is_dir() else ["v2 files"]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer scrapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("exporter: makes control groups and needs root. Run it with sudo.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # groups and processes go in any case
    rounds = 10 if options.quick else 40
    rows = []
    with tempfile.TemporaryDirectory(prefix="carme-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        library = simulated_gpus.build(folder, unchanging=True)
        for layout in layouts():
            costs = {}
            with Node(folder, layout) as node:
                for count in (JOBS * len(STEPS), PROCESSES):
                    node.populate(count)
                    costs[count] = carme(node, library, rounds)
                peers = {
                    "node_exporter": node_exporter(rounds),
                    "subprocess": started_program(node, library, folder, rounds),
                }
            rows += _rows(layout, costs, peers)
        rows.append(_cluster_row(cluster(folder, rounds)))
    print_table(rows)
    if options.json:
        write_json(options.json, rows)
    return 0 if all(row["holds"] is not False for row in rows) else 1


def _rows(layout: str, costs: dict[int, Cost], peers: dict[str, Cost | None]) -> list[dict[str, object]]:
    full = costs[PROCESSES]

    def peers_by(value: Callable[[Cost], float]) -> dict[str, float | None]:
        return {name: value(cost) if cost and value(cost) else None for name, cost in peers.items()}

    few = costs[JOBS * len(STEPS)]
    growth, factor = full.cpu_ms / few.cpu_ms, PROCESSES / (JOBS * len(STEPS))
    return [
        row(f"scrape_ms {layout}", "ms", full.scrape_ms, peers=peers_by(lambda measured: measured.scrape_ms),
            aim="median under 50 ms", holds=full.scrape_ms < 50),
        row(f"cpu_percent {layout}", "% of core", full.share, peers=peers_by(lambda measured: measured.share),
            aim="under 0.5 % at a scrape every 15 s", holds=full.share < 0.5),
        row(f"memory_mb {layout}", "MiB", full.memory_mb, peers=peers_by(lambda measured: measured.memory_mb),
            aim="peak under 60 MiB", holds=full.memory_mb < 60),
        row(f"series {layout}", "", float(full.series), peers=peers_by(lambda cost: float(cost.series)),
            answer_bytes=full.answer_bytes),
        row(f"growth {layout}", "times", growth,
            aim=f"processor time grows less than processes ({factor:.1f} times)", holds=growth < factor,
            cpu_ms={str(count): round(cost.cpu_ms, 2) for count, cost in costs.items()}),
    ]  # fmt: skip


def _cluster_row(cost: Cost) -> dict[str, object]:
    seconds = cost.scrape_ms / 1000
    return row(
        f"cluster_{NODES}_nodes_s", "s", seconds,
        aim=f"median under 1 s, with {QUEUED} jobs", holds=seconds < 1,
        cpu_ms=round(cost.cpu_ms, 1), memory_mb=round(cost.memory_mb, 1), series=cost.series,
        answer_bytes=cost.answer_bytes,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
