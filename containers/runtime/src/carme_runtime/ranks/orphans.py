"""Find and end processes whose run on this node is over.

A run ends the process group of each of its ranks. What remains is what left its group, as daemons do, and
the ranks of an agent that was killed together with the process that supervises it. All of them have the
run's mark in their environment. A process that clears that is out of sight.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "CARME_RUN"
_PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Orphan:
    """A process whose run was over when we searched for it; `ended`: it is gone now."""

    pid: int
    command: str
    ended: bool


def mark(number: int) -> str:
    """What the ranks of run `number` of this process are to have in their variable CARME_RUN."""
    return f"{_namespace()}:{os.getpid()}:{_start_of(os.getpid())}:{number}"


def clear(
    is_over: Callable[[int], bool],
    script: str = "",
    spared: str = "",
    number: signal.Signals | None = signal.SIGTERM,
    seconds: float = 0.0,
) -> list[Orphan]:
    """End this user's orphans on this node, by number of their processes.

    Args:
        is_over: Whether the run that this process gave this number is over.
        script: Only those with a file of this name among their arguments; empty: all.
        spared: A mark whose run is not over, whatever else is known of it; empty: none.
        number: The signal that they get; None: they are only reported.
        seconds: How long they have to end.

    Raises:
        OSError: The kernel has no pidfd (older than Linux 5.3).
    """
    with contextlib.ExitStack() as handles:
        found: list[tuple[int, int, str]] = []
        for pid in sorted(int(folder.name) for folder in _PROCESSES.iterdir() if folder.name.isdecimal()):
            if not _is_orphan(pid, is_over, script, spared):
                continue
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            handles.callback(os.close, handle)
            # Once more: the number may have been given to another process before there was a handle.
            if _is_orphan(pid, is_over, script, spared):
                found.append((pid, handle, " ".join(_arguments(pid))))
        for _, handle, _ in found:
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
        deadline = time.monotonic() + seconds
        return [Orphan(pid, command, _ends(handle, deadline)) for pid, handle, command in found]


def _is_orphan(pid: int, is_over: Callable[[int], bool], script: str, spared: str) -> bool:
    of_run = _mark_of(pid)
    if not of_run or of_run == spared or not _has_ended(of_run, is_over):
        return False
    return not script or Path(script).name in {Path(word).name for word in _arguments(pid)}


def _mark_of(pid: int) -> str:
    """The mark of a process of this user; empty where it has none."""
    folder, head = _PROCESSES / str(pid), f"{MARK}=".encode()
    with contextlib.suppress(OSError):  # it has ended, or is not for this process to see
        if folder.stat().st_uid == os.getuid():
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(head):
                    return entry[len(head) :].decode(errors="replace")
    return ""


def _arguments(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        text = (_PROCESSES / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        return text.rstrip("\0").split("\0")
    return []


def _has_ended(of_run: str, is_over: Callable[[int], bool]) -> bool:
    """Whether the run of this mark is over; no, where the mark's numbers mean nothing here."""
    namespace, _, rest = of_run.rpartition("]:")
    numbers = rest.split(":")
    if f"{namespace}]" != _namespace() or len(numbers) != 3 or not all(map(str.isdecimal, numbers)):
        return False
    agent, started, number = map(int, numbers)
    if agent == os.getpid() and started == _start_of(agent):
        return is_over(number)
    return _start_of(agent) != started


def _namespace() -> str:
    """Within which numbers of processes mean what they mean to this one."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115


def _start_of(pid: int) -> int:
    """When process `pid` started, in ticks of the kernel's clock; -1 where there is none."""
    with contextlib.suppress(OSError):
        # The name before it may hold anything.
        return int((_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    return -1


def _ends(handle: int, deadline: float) -> bool:
    """Whether the process of a pidfd ends before `deadline` (time.monotonic)."""
    return bool(select.select([handle], [], [], max(deadline - time.monotonic(), 0))[0])
