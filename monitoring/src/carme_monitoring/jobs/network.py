"""What a job sends and receives, where that can be known.

Linux counts by interface, not by process. So there are two cases in which the figures are a job's:

- `namespace`: all its processes are in network namespaces of their own, whose interfaces nobody else uses.
- `node`: it shares the node's network and was the only job there between two looks; then it counts all that
  the node's physical interfaces and InfiniBand ports carried meanwhile.

Otherwise it has no figures. The namespace of a process is known by the inode of its `net/dev`, which
everybody may ask for; the link `ns/net` only its owner may read. Files: proc(5), proc_pid_net(5), Linux
ABI/stable/sysfs-class-infiniband.
"""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from carme_monitoring.jobs.files import text_of

__all__ = ["Network", "Traffic"]

#: Jobs and processes of a job that are looked through in one pass, so that it takes no longer with many. Who
#: is in which namespace seldom changes.
MOST_JOBS, MOST_PROCESSES = 8, 64
MOST_NAMESPACES = 16  # of one job
_WORD = 4  # bytes in which InfiniBand counts
_INFINIBAND = "32"  # ARPHRD_INFINIBAND: what such an interface carries, its port counts as well

Counted = dict[str, tuple[int, int]]  # bytes received and sent, by interface


@dataclass(slots=True)
class Traffic:
    """Bytes that a job received and sent since it was first seen; `source` is `namespace` or `node`."""

    received_bytes: int
    sent_bytes: int
    source: str


@dataclass(slots=True)
class _Job:
    """What is known of one: a process in each of its own namespaces, by inode; whether it has the node's.

    None: no process of it was seen.
    """

    searched_pass: int = -1
    shares: bool | None = None
    inside: dict[int, int] = field(default_factory=dict)
    sums: dict[str, list[int]] = field(default_factory=dict)
    before: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)


class Network:
    """The network of this node's jobs.

    Args:
        processes: The folder of processes, `/proc`.
        interfaces: `/sys/class/net`.
        infiniband: `/sys/class/infiniband`.
    """

    def __init__(
        self,
        processes: Path = Path("/proc"),
        interfaces: Path = Path("/sys/class/net"),
        infiniband: Path = Path("/sys/class/infiniband"),
    ) -> None:
        self._processes, self._interfaces, self._infiniband = processes, interfaces, infiniband
        self._jobs: dict[int, _Job] = {}
        self._alone: int | None = None
        self._pass, self._lock = 0, threading.Lock()

    def traffic(
        self, job_ids: Iterable[int], processes_of: Callable[[int], Iterable[int]]
    ) -> dict[int, Traffic]:
        """The traffic of those jobs whose traffic can be known.

        Args:
            job_ids: All jobs of the node.
            processes_of: The processes of one of them.
        """
        with self._lock:
            self._pass += 1
            self._jobs = {job_id: self._jobs.get(job_id) or _Job() for job_id in job_ids}
            longest_ago = sorted(self._jobs.values(), key=lambda job: job.searched_pass)[:MOST_JOBS]
            saved = {id(job) for job in longest_ago}
            for job_id, job in self._jobs.items():
                if id(job) in saved:
                    self._find_namespaces(job, processes_of(job_id))
            return self._all()

    def _all(self) -> dict[int, Traffic]:
        found: dict[int, Traffic] = {}
        users: dict[int, int] = {}
        for job in self._jobs.values():
            for inode in job.inside:
                users[inode] = users.get(inode, 0) + 1
        for job_id, job in self._jobs.items():
            if job.shares is False and all(users[inode] == 1 for inode in job.inside):
                found[job_id] = self._inside(job)
        alone = next(iter(self._jobs)) if len(self._jobs) == 1 else None
        if alone is not None and self._jobs[alone].shares:
            # From the second look on which it is alone: what came to pass before was not its own.
            found[alone] = self._of_node(self._jobs[alone], fresh=self._alone != alone)
            self._alone = alone
        else:
            self._alone = None
        return found

    def _find_namespaces(self, job: _Job, processes: Iterable[int]) -> None:
        """Find out in which namespaces the job's own processes are; slurmstepd is root's."""
        job.searched_pass = self._pass
        own = _inode(f"{self._processes}/self/net/dev")
        job.inside, shares, seen = {}, False, False
        for number, pid in enumerate(processes):
            if number >= MOST_PROCESSES:
                break
            try:
                if os.stat(f"{self._processes}/{pid}").st_uid == 0:  # noqa: PTH116  many calls in one scrape
                    continue
            except OSError:
                continue
            inode = _inode(f"{self._processes}/{pid}/net/dev")
            if inode is None:
                continue
            seen = True
            if inode == own:
                shares = True
                break
            if len(job.inside) < MOST_NAMESPACES:
                job.inside[inode] = pid
        job.shares = shares if seen else None

    def _inside(self, job: _Job) -> Traffic:
        for inode, pid in job.inside.items():
            path = f"{self._processes}/{pid}/net/dev"
            text = text_of(path)
            if _inode(path) != inode:
                job.searched_pass = -1  # the process has ended or moved: look again in the next pass
                continue
            for name, counts in _counted(text).items():
                # Its interfaces began at 0 with the namespace, which is the job's.
                _add(job, "namespace", (inode, name), counts, (0, 0))
        return _traffic(job, "namespace")

    def _of_node(self, job: _Job, *, fresh: bool) -> Traffic:
        for name, counts in self._node().items():
            key = (0, name)
            if fresh:
                job.before[key] = counts
            _add(job, "node", key, counts, counts)
        return _traffic(job, "node")

    def _node(self) -> Counted:
        """The node's interfaces and ports that lead out of it."""
        every = _counted(text_of(f"{self._processes}/self/net/dev"))
        ports = self._ports()
        outward = {
            name: counts
            for name, counts in every.items()
            if os.path.exists(f"{self._interfaces}/{name}/device")  # noqa: PTH110
            and not (ports and text_of(f"{self._interfaces}/{name}/type").strip() == _INFINIBAND)
        }
        # Bridges, bonds and the like count what others count already; a container has nothing else.
        return {**(outward or ({} if ports else every)), **ports}

    def _ports(self) -> Counted:
        found: Counted = {}
        for device in _names(f"{self._infiniband}"):
            for port in _names(f"{self._infiniband}/{device}/ports"):
                folder = f"{self._infiniband}/{device}/ports/{port}/counters"
                words = [text_of(f"{folder}/{name}").strip() for name in ("port_rcv_data", "port_xmit_data")]
                if all(word.isdecimal() for word in words):
                    found[f"{device}/{port}"] = (int(words[0]) * _WORD, int(words[1]) * _WORD)
        return found


def _add(
    job: _Job, source: str, key: tuple[int, str], counts: tuple[int, int], first: tuple[int, int]
) -> None:
    """Add what a counter grew by; one that became smaller began anew."""
    sums = job.sums.setdefault(source, [0, 0])
    before = job.before.get(key, first)
    for place in (0, 1):
        grown = counts[place] - before[place]
        sums[place] += grown if grown >= 0 else counts[place]
    job.before[key] = counts


def _traffic(job: _Job, source: str) -> Traffic:
    received, sent = job.sums.get(source, (0, 0))
    return Traffic(received, sent, source)


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116  many calls in one scrape
    except OSError:
        return None


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return []


def _counted(text: str) -> Counted:
    """`net/dev`, without loopback."""
    found: Counted = {}
    for line in text.splitlines():
        name, colon, rest = line.rpartition(":")
        words = rest.split()
        if colon and len(words) >= 9 and words[0].isdecimal() and words[8].isdecimal():
            name = name.strip()
            if name != "lo":
                found[name] = (int(words[0]), int(words[8]))
    return found
