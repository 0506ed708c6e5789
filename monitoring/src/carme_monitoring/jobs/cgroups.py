"""What the jobs of this node use, from their control groups.

Slurm's layout differs between versions 1 and 2 of cgroups and between its releases (`uid_N/job_N/step_N`,
`slurmstepd.scope/job_N/step_N`, other names for jobs since 26.05): a job's folder is one beneath Slurm's own
in which `slurmstepd` works for a single job, whatever it is called.
Files: Linux, admin-guide/cgroup-v1 and admin-guide/cgroup-v2.
"""

import contextlib
import os
import re
import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from carme_monitoring.jobs.files import OpenFiles, OpenFolders, text_of, whole_text_of

__all__ = ["Cgroups", "StepUsage", "Usage"]

_JOB = re.compile(r"job_(\d+)\Z", re.ASCII)
#: Slurm's own folders alone: beneath `user.slice` users may make groups of any name.
_JOB_OF_PROCESS = re.compile(
    r"^\d+:[^:\n]*:(?!.*/user\.slice/).*/(?:slurm[^/\n]*/uid_\d+|[^/\n]*slurmstepd\.scope)/job_(\d+)(?:/|$)",
    re.MULTILINE | re.ASCII,
)
_STEP = re.compile(r"step_(\w+)\Z", re.ASCII)
_TITLE = re.compile(rb"slurmstepd: \[(\d+)\.")
#: Controllers of version 1, the first that all jobs are in (proctrack/cgroup freezes them) before the others.
_V1 = ("freezer", "memory", "devices", "cpuacct", "cpu,cpuacct", "cpuacct,cpu")
#: Processes whose job is remembered, until there are more.
_MOST_REMEMBERED = 1 << 14
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of the page size
#: By major: NVIDIA's GPUs (from 254 on are control devices, which every job may open), others' render nodes.
_GPU_MINORS = {"195": range(254), "226": range(128, 1 << 20)}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class StepUsage:
    """What one step uses; see `Usage`."""

    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    oom_kills: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    threads: int | None = None


@dataclass(slots=True)
class Usage:
    """What one job uses on this node.

    Attributes:
        cpu_user_seconds, cpu_system_seconds: Counters over all its processes.
        memory_bytes: What cannot be given back: without the page cache that is not in use.
        memory_peak_bytes, memory_limit_bytes: The highest ever, page cache included, and what it may have.
        oom_kills: Processes that the kernel ended for want of memory.
        read_bytes, written_bytes: Of disks. Version 1 does not report: see `ProcessIoRecords`.
        threads: At this moment.
        devices: Device files of GPUs (minors) that it may open; None if the kernel does not say, or was not
            queried.
    """

    job_id: int
    uid: int | None = None
    cpu_user_seconds: float | None = None
    cpu_system_seconds: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_kills: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    threads: int | None = None
    devices: frozenset[int] | None = None
    steps: dict[str, StepUsage] = field(default_factory=dict)


@dataclass(slots=True)
class _Folders:
    """Where one job's files are: by controller for version 1, all in "" for version 2."""

    job_id: int
    uid: int | None
    by_controller: dict[str, str] = field(default_factory=dict)


class Cgroups:
    """The control groups of this node.

    Args:
        root: Where they are mounted.
        processes: The folder of processes, `/proc`.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), processes: Path = Path("/proc")) -> None:
        self._root, self._processes = str(root), str(processes)
        self._names: dict[str, int] = {}  # folders whose name does not have the job
        self._owners: dict[tuple[str, int], int] = {}  # by folder and inode
        self._places: dict[int, str] = {}  # of each job that there is
        self._kills: dict[int, dict[str, int]] = {}  # by job and group, for version 1
        self._jobs_of: dict[int, tuple[int, int]] = {}  # inode and job, by process
        self._files, self._folders, self._lock = OpenFiles(), OpenFolders(), threading.Lock()

    def usage(self, owned: Container[int] = ()) -> list[Usage]:
        """What each job uses now; a job that ends meanwhile is left out or has gaps.

        Args:
            owned: Jobs whose owner and GPUs are known: to find these out takes a look at their processes.
                What is not among them and has no process any more has ended, and only its groups are left.
        """
        with self._lock:
            known, self._owners = self._owners, {}
            jobs = [job for job in self._jobs() if job.job_id in owned or not self._is_left_over(job)]
            self._places = {job.job_id: next(iter(job.by_controller.values())) for job in jobs}
            found = [
                self._version_2(
                    job, None if job.job_id in owned else self._owner(job.by_controller[""], known)
                )
                if "" in job.by_controller
                else self._version_1(job, devices=job.job_id not in owned)
                for job in jobs
            ]
            self._kills = {job.job_id: self._kills.get(job.job_id, {}) for job in jobs}
            self._files.close_unused()
            self._folders.forget_unused()
        return found

    def is_there(self, pid: int) -> bool:
        """Whether the process has not ended yet."""
        return os.path.exists(f"{self._processes}/{pid}")  # noqa: PTH110  many calls in one scrape

    def processes_of(self, job_id: int) -> Iterator[int]:
        """The processes of a job that the last look has found, without slurmstepd where that is known."""
        place = self._places.get(job_id)
        return _processes(place) if place else iter(())

    def processes_by_step(self) -> dict[int, dict[str, list[int]]]:
        """The processes of each job's steps now."""
        with self._lock:
            found = {
                job.job_id: self._by_step(next(iter(job.by_controller.values()))) for job in self._jobs()
            }
            self._folders.forget_unused()
        return found

    def _by_step(self, job: str) -> dict[str, list[int]]:
        names = ((_STEP.match(name), name) for name in self._folders.names(job))
        return {step[1]: list(_processes(f"{job}/{name}")) for step, name in names if step}

    def job_of(self, pid: int) -> int | None:
        """The job that a process belongs to."""
        # A process stays in its job, and each has an inode of its own: the same inode is the same process.
        # Asking for that takes an eighth of the time that its groups take.
        inode = _inode_of(f"{self._processes}/{pid}")
        known = self._jobs_of.get(pid)
        if known and known[0] == inode:
            return known[1]
        job_id = self._read_job(pid)
        if inode is not None and job_id is not None:
            if len(self._jobs_of) >= _MOST_REMEMBERED:
                self._jobs_of = {}
            self._jobs_of[pid] = inode, job_id
        return job_id

    def _read_job(self, pid: int) -> int | None:
        text = text_of(f"{self._processes}/{pid}/cgroup")
        if found := _JOB_OF_PROCESS.search(text):
            return int(found[1])
        for path in (line.rpartition(":")[2] for line in text.splitlines()) if self._names else ():
            for folder, job_id in list(self._names.items()):  # another thread may add some
                if f"{path}/".startswith(f"{folder.removeprefix(self._root)}/"):
                    return job_id
        return None

    # -- finding them

    def _jobs(self) -> list[_Folders]:
        if os.path.exists(f"{self._root}/cgroup.controllers"):  # noqa: PTH110  many calls in one scrape
            return self._unified()
        mounted = set(self._folders.names(self._root))
        jobs: dict[int, _Folders] = {}
        for controller in _V1:
            for slurm in self._folders.names(f"{self._root}/{controller}") if controller in mounted else ():
                if slurm.startswith("slurm"):
                    used = [
                        name
                        for name in _V1
                        # Slurm makes groups of those alone that it is configured for.
                        if name in mounted and os.path.exists(f"{self._root}/{name}/{slurm}")  # noqa: PTH110
                    ]
                    self._add(jobs, f"{controller}/{slurm}", used)
            if jobs:
                break  # the others have the same folders: looking through each would cost most of a scrape
        return list(jobs.values())

    def _add(self, jobs: dict[int, _Folders], slurm: str, controllers: list[str]) -> None:
        for owner in self._folders.names(f"{self._root}/{slurm}"):
            uid = owner.removeprefix("uid_")
            for name in self._folders.names(f"{self._root}/{slurm}/{owner}"):
                if job_id := self._number(f"{self._root}/{slurm}/{owner}", name):
                    job = _Folders(job_id, int(uid) if uid.isdecimal() else None)
                    beneath = f"{slurm.partition('/')[2]}/{owner}/{name}"
                    for controller in controllers:
                        kind = "cpuacct" if "cpuacct" in controller else controller
                        job.by_controller.setdefault(kind, f"{self._root}/{controller}/{beneath}")
                    jobs.setdefault(job_id, job)

    def _unified(self) -> list[_Folders]:
        jobs: dict[int, _Folders] = {}
        for scope in self._scopes(self._root, 3):
            for name in self._folders.names(scope):
                if job_id := self._number(scope, name):
                    job = _Folders(job_id, None, {"": f"{scope}/{name}"})
                    # The prolog makes `job_N` also where Slurm has another name for it: that stays empty.
                    if job_id not in jobs or self._is_left_over(jobs[job_id]):
                        jobs[job_id] = job
        return list(jobs.values())

    def _scopes(self, folder: str, depth: int) -> Iterator[str]:
        """Slurm's own folders: `slurmstepd.scope`, or one for each slurmd (`NODE_slurmstepd.scope`)."""
        for name in self._folders.names(folder):
            if name.endswith("slurmstepd.scope"):
                yield f"{folder}/{name}"
            elif depth and name.endswith(".slice"):
                yield from self._scopes(f"{folder}/{name}", depth - 1)

    def _is_left_over(self, job: _Folders) -> bool:
        """Whether the kernel says that there is no process in it: Slurm could not remove its groups."""
        if folder := job.by_controller.get(""):
            return _field(self._files.text(f"{folder}/cgroup.events"), "populated") == 0
        return self._is_empty(next(iter(job.by_controller.values())))

    def _is_empty(self, folder: str) -> bool:
        # Version 1 reports what is in a group itself, not beneath.
        return (
            os.path.exists(f"{folder}/cgroup.procs")  # noqa: PTH110  many calls in one scrape
            and not text_of(f"{folder}/cgroup.procs")
            and all(self._is_empty(f"{folder}/{name}") for name in self._folders.names(folder))
        )

    def _number(self, parent: str, name: str) -> int | None:
        """The job that a folder belongs to; None for Slurm's own (`system`)."""
        if found := _JOB.match(name):
            return int(found[1])
        if name in ("system", "slurm"):
            return None
        folder = f"{parent}/{name}"
        if folder not in self._names:
            self._names = {path: number for path, number in self._names.items() if os.path.isdir(path)}  # noqa: PTH112
            job_id = self._job_of_titles(folder)
            if job_id is None:
                return None
            self._names[folder] = job_id
        return self._names[folder]

    def _job_of_titles(self, folder: str) -> int | None:
        """The job that slurmstepd names in its title, from a folder that has another kind of name.

        Users may give their processes any title; slurmstepd's owner is that of the folder, which it made.
        """
        owner = _owner_of(folder)
        for parent, _, files in os.walk(folder):
            if "cgroup.procs" not in files:
                continue
            for pid in whole_text_of(f"{parent}/cgroup.procs").split():
                if owner is None or _owner_of(f"{self._processes}/{pid}") != owner:
                    continue
                with contextlib.suppress(OSError):
                    if found := _TITLE.match(Path(self._processes, pid, "cmdline").read_bytes()):
                        return int(found[1])
        return None

    # -- reading them

    def _version_2(self, job: _Folders, uid: int | None) -> Usage:
        states = self._files.text
        folder = job.by_controller[""]
        cpu = _table(states(f"{folder}/cpu.stat"))
        read, written = self._io(f"{folder}/io.stat")
        steps = {
            found[1]: self._step_of_version_2(f"{folder}/{step}")
            for step in self._folders.names(folder)
            if (found := _STEP.match(step))
        }
        threads = [step.threads for step in steps.values() if step.threads is not None]
        return Usage(
            job_id=job.job_id,
            uid=uid,
            cpu_user_seconds=_scaled(cpu.get("user_usec"), 1e-6),
            cpu_system_seconds=_scaled(cpu.get("system_usec"), 1e-6),
            memory_bytes=_subtract(
                _number(states(f"{folder}/memory.current")),
                _field(states(f"{folder}/memory.stat"), "inactive_file"),
            ),
            memory_peak_bytes=_number(states(f"{folder}/memory.peak")),
            memory_limit_bytes=_limit(_number(states(f"{folder}/memory.max"))),
            oom_kills=_field(states(f"{folder}/memory.events"), "oom_kill"),
            read_bytes=read,
            written_bytes=written,
            threads=sum(threads) if threads else None,
            steps=steps,
        )

    def _step_of_version_2(self, step: str) -> StepUsage:
        shows = self._files.text
        read, written = self._io(f"{step}/io.stat")
        # Slurm enables no controller that counts them; lists there are without any.
        tasks = [
            self._tasks_beneath(f"{step}/{name}") for name in self._folders.names(step) if name != "slurm"
        ]
        threads = [count for count in tasks if count is not None]
        return StepUsage(
            _scaled(_field(shows(f"{step}/cpu.stat"), "usage_usec"), 1e-6),
            _subtract(
                _number(shows(f"{step}/memory.current")),
                _field(shows(f"{step}/memory.stat"), "inactive_file"),
            ),
            _number(shows(f"{step}/memory.peak")),
            _field(shows(f"{step}/memory.events"), "oom_kill"),
            read,
            written,
            sum(threads) if threads else None,
        )

    def _io(self, path: str) -> tuple[int | None, int | None]:
        """Bytes read and written, of an `io.stat`, which is empty until there are any."""
        text = self._files.text(path)
        return (0, 0) if not text and self._files.lines(path) is not None else _io(text)

    def _version_1(self, job: _Folders, *, devices: bool) -> Usage:
        states = self._files.text
        memory = job.by_controller.get("memory", "")
        cpu = job.by_controller.get("cpuacct", "")
        cpu_times = _table(states(f"{cpu}/cpuacct.stat"))
        threads = next(iter(job.by_controller.values()))
        steps: dict[str, StepUsage] = {}
        for step in self._folders.names(memory):
            if found := _STEP.match(step):
                steps[found[1]] = StepUsage(
                    _scaled(_number(states(f"{cpu}/{step}/cpuacct.usage")), 1e-9),
                    _subtract(
                        _number(states(f"{memory}/{step}/memory.usage_in_bytes")),
                        _field(states(f"{memory}/{step}/memory.stat"), "total_inactive_file"),
                    ),
                    _number(states(f"{memory}/{step}/memory.max_usage_in_bytes")),
                    self._kills_beneath(job.job_id, f"{memory}/{step}"),
                    threads=self._tasks_beneath(f"{threads}/{step}", "tasks"),
                )
        return Usage(
            job_id=job.job_id,
            uid=job.uid,
            cpu_user_seconds=_scaled(cpu_times.get("user"), 1 / _TICKS),
            cpu_system_seconds=_scaled(cpu_times.get("system"), 1 / _TICKS),
            memory_bytes=_subtract(
                _number(states(f"{memory}/memory.usage_in_bytes")),
                _field(states(f"{memory}/memory.stat"), "total_inactive_file"),
            ),
            memory_peak_bytes=_number(states(f"{memory}/memory.max_usage_in_bytes")),
            memory_limit_bytes=_limit(_number(states(f"{memory}/memory.limit_in_bytes"))),
            oom_kills=self._kills_of(job.job_id, memory),
            threads=self._tasks_beneath(threads, "tasks"),
            devices=_devices(states(f"{job.by_controller.get('devices', '')}/devices.list"))
            if devices
            else None,
            steps=steps,
        )

    def _tasks_beneath(self, folder: str, file: str = "cgroup.threads") -> int | None:
        """Threads in a group and those beneath it; version 1 lists them in `tasks` of each controller."""
        own = self._files.lines(f"{folder}/{file}")
        if own is None:
            return None
        beneath = self._folders.names(folder)
        return own + sum(self._tasks_beneath(f"{folder}/{name}", file) or 0 for name in beneath)

    def _kills_beneath(self, job_id: int, folder: str) -> int | None:
        """Version 1 counts in the group of the process that was ended, and in none above it."""
        own = _field(self._files.text(f"{folder}/memory.oom_control"), "oom_kill")
        if own is None:
            return None
        if own:
            self._kills.setdefault(job_id, {})[folder] = own
        return own + sum(
            self._kills_beneath(job_id, f"{folder}/{name}") or 0 for name in self._folders.names(folder)
        )

    def _kills_of(self, job_id: int, folder: str) -> int | None:
        """Those of the whole job, with those of steps that have ended; its steps have been counted."""
        own = _field(self._files.text(f"{folder}/memory.oom_control"), "oom_kill")
        return None if own is None else own + sum(self._kills.get(job_id, {}).values())

    def _owner(self, folder: str, known: dict[tuple[str, int], int]) -> int | None:
        """The user of the job's own processes; slurmstepd itself is root. A job does not change its user."""
        inode = _inode_of(folder)
        if inode is None:
            return None
        which = folder, inode
        uid = known.get(which) or self._read_owner(folder)
        if uid is not None:
            self._owners[which] = uid
        return uid

    def _read_owner(self, folder: str) -> int | None:
        for pid in _processes(folder):
            if uid := _owner_of(f"{self._processes}/{pid}"):
                return uid
        return None


def _processes(folder: str) -> Iterator[int]:
    """The processes of a job's group, without slurmstepd where it has a group of its own."""
    for parent, _, files in os.walk(folder):
        if "cgroup.procs" in files and not parent.endswith("/slurm"):
            pids = whole_text_of(f"{parent}/cgroup.procs").split()
            yield from (int(pid) for pid in pids if pid.isdecimal())


def _owner_of(path: str) -> int | None:
    try:
        return os.stat(path).st_uid  # noqa: PTH116  many calls in one scrape
    except OSError:
        return None


def _inode_of(path: str) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116  many calls in one scrape
    except OSError:
        return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _table(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            found[name] = int(value)
    return found


def _field(text: str, name: str) -> int | None:
    """One number of such lines; memory.stat has some sixty."""
    text = "\n" + text
    _, found, rest = text.partition(f"\n{name} ")
    value = rest.partition("\n")[0]
    return int(value) if found and value.isdecimal() else None


def _io(text: str) -> tuple[int | None, int | None]:
    """Bytes read and written over all devices: `8:0 rbytes=1 wbytes=2 ...`."""
    pairs = [pair.split("=", 1) for line in text.splitlines() for pair in line.split()[1:] if "=" in pair]
    sums = {
        kind: sum(int(value) for name, value in pairs if name == kind and value.isdecimal())
        for kind in ("rbytes", "wbytes")
    }
    return (sums["rbytes"], sums["wbytes"]) if pairs else (None, None)


def _devices(text: str) -> frozenset[int] | None:
    """Minors of GPUs' device files that the group may open; None for "all" and "unknown"."""
    rows = [line.split() for line in text.splitlines()]
    if not rows or any(row[:2] in (["a", "*:*"], ["c", "*:*"], ["c", "195:*"]) for row in rows):
        return None
    minors = (row[1].partition(":") for row in rows if len(row) > 1 and row[0] == "c")
    return frozenset(
        int(minor)
        for major, _, minor in minors
        if minor.isdecimal() and int(minor) in _GPU_MINORS.get(major, ())
    )


def _limit(value: int | None) -> int | None:
    return None if value is None or value >= _NO_LIMIT else value


def _subtract(value: int | None, part: int | None) -> int | None:
    return None if value is None else max(0, value - (part or 0))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
