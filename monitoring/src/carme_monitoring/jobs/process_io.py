"""What jobs read and write, where control groups of version 1 do not count it.

Slurm makes no groups for that, and the kernel would not count in them what is written through the page cache;
newer ones (6.18 was tried) count nothing at all there. They count for each process, though (proc(5),
`/proc/PID/io`), and add to a process what those of its children did for which it waited. Only who may trace a
process may read that: a program of its own does (`carme-io-reader`), and the exporter reads what that one
writes down.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from carme_monitoring.jobs.cgroups import Usage
from carme_monitoring.jobs.files import OpenFiles

__all__ = ["ProcessIo", "ProcessIoRecords"]

_NUMBERS = 4  # of a step, see `_Sum`
_NAMES = ("read_bytes: ", "\nwrite_bytes: ")

Steps = Mapping[int, Mapping[str, Iterable[int]]]
"""Processes by job and step."""


@dataclass(slots=True)
class _Sum:
    """Bytes of a step, and those of the processes that it had at the last look."""

    read: int = 0
    written: int = 0
    read_then: int = 0
    written_then: int = 0

    def grow(self, read: int, written: int) -> None:
        # Less than before: a process has ended for which nobody of the job waited. What it did stays counted.
        self.read += max(0, read - self.read_then)
        self.written += max(0, written - self.written_then)
        self.read_then, self.written_then = read, written


class ProcessIo:
    """Sums over the processes of each step, which never shrink while the job is there.

    Args:
        file: Where they are written down; what a reader before this one wrote is gone on with.
        processes: The folder of processes, `/proc`.
    """

    def __init__(self, file: Path, processes: Path = Path("/proc")) -> None:
        self._file, self._processes = file, str(processes)
        self._files = OpenFiles()
        self._sums: dict[int, dict[str, _Sum]] = {
            job_id: {step: _Sum(*(int(value) for value in values)) for step, values in steps.items()}
            for job_id, steps in _read(file).items()
        }

    def update(self, jobs: Steps) -> None:
        """Count what these processes have done by now; jobs that are not among them have ended.

        Raises:
            OSError: The file cannot be written.
        """
        known, self._sums = self._sums, {}
        for job_id, steps in jobs.items():
            sums = self._sums[job_id] = known.get(job_id, {})  # with those of its steps that have ended
            for step, pids in steps.items():
                found = [self._bytes_of(pid) for pid in pids]
                sums.setdefault(step, _Sum()).grow(sum(r for r, _ in found), sum(w for _, w in found))
        self._files.close_unused()
        self._write()

    def _bytes_of(self, pid: int) -> tuple[int, int]:
        text = self._files.text(f"{self._processes}/{pid}/io")
        read, written = (text.partition(name)[2].partition("\n")[0] for name in _NAMES)
        return int(read) if read.isdecimal() else 0, int(written) if written.isdecimal() else 0

    def _write(self) -> None:
        new = self._file.with_suffix(".new")
        jobs = {
            str(job_id): {
                step: [each.read, each.written, each.read_then, each.written_then]
                for step, each in steps.items()
            }
            for job_id, steps in self._sums.items()
        }
        new.write_text(json.dumps(jobs, separators=(",", ":")))
        new.rename(self._file)


class ProcessIoRecords:
    """What `ProcessIo` wrote down.

    Args:
        file: Of it; there is none where control groups count themselves.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = 0
        self._jobs: dict[int, dict[str, list[float]]] = {}

    def add_to(self, usages: Iterable[Usage]) -> None:
        """Complete these where their control groups do not report."""
        try:
            changed = self._file.stat().st_mtime_ns
        except OSError:
            return
        if changed != self._changed:
            self._jobs, self._changed = _read(self._file), changed
        for usage in usages:
            steps = self._jobs.get(usage.job_id)
            if steps is None or usage.read_bytes is not None:
                continue
            usage.read_bytes = sum(int(values[0]) for values in steps.values())
            usage.written_bytes = sum(int(values[1]) for values in steps.values())
            for step, used in usage.steps.items():
                if step in steps:
                    used.read_bytes, used.written_bytes = int(steps[step][0]), int(steps[step][1])


def _read(file: Path) -> dict[int, dict[str, list[float]]]:
    """The records in a file; none where there are none, or others."""
    try:
        found = json.loads(file.read_bytes())
        return {
            int(job_id): {str(step): [int(value) for value in values] for step, values in steps.items()}
            for job_id, steps in found.items()
            if all(len(values) == _NUMBERS for values in steps.values())
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
