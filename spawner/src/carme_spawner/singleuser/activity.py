"""When a session was last busy: its kernels, terminals, GPUs and ranks.

A person who is away is not idle while a computation of theirs runs, so this looks at what computes, never at
browsers.
"""

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

#: Share of one processor from which on the job's other processes count as computing.
BUSY_SHARE = 0.1
#: Percent of a GPU's time from which on it counts as busy.
BUSY_PERCENT = 1
#: Programs that live exactly as long as a run of `carme-run`, whichever nodes its ranks are on.
LAUNCHERS = ("carme-run", "carme_runtime.launcher")


class Gpus:
    """The job's NVIDIA GPUs, by the library of their driver; none if it cannot be loaded."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [
                pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())
            ]
            self._library = pynvml
        except Exception:  # the package, the library or the driver is not there
            self._handles = []

    def busy(self) -> bool | None:
        """Whether one computes now; None if that cannot be known."""
        if not self._handles:
            return None
        try:
            used = [self._library.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
        except self._library.NVMLError:
            return None
        return max(used) >= BUSY_PERCENT


class Processes:
    """This node's processes of the job but this server: ranks, programs started in terminals and by kernels.

    The job's agent keeps no list of runs, so processor time counts; a launcher counts even while it only
    waits for its ranks on other nodes.

    Args:
        top: The process below which all of the job is; default this server's parent, the node's agent.
    """

    def __init__(self, top: int | None = None) -> None:
        self._top = top if top is not None else os.getppid()
        self._seconds: dict[tuple[int, float], float] = {}
        self._measured_at = time.monotonic()
        self.busy()

    def busy(self) -> bool | None:
        """Whether they computed since the last call; None if that cannot be known."""
        if self._top <= 1:
            return None
        seconds: dict[tuple[int, float], float] = {}
        launcher = False
        try:
            processes = psutil.Process(self._top).children(recursive=True)
        except psutil.Error:
            return None
        for process in processes:
            if process.pid == os.getpid():
                continue
            with contextlib.suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                seconds[process.pid, process.create_time()] = times.user + times.system
                launcher = launcher or any(word.endswith(LAUNCHERS) for word in process.cmdline()[:4])
        now = time.monotonic()
        spent = sum(max(0.0, value - self._seconds.get(key, 0.0)) for key, value in seconds.items())
        share = spent / max(now - self._measured_at, 1e-3)
        self._seconds, self._measured_at = seconds, now
        return launcher or share >= BUSY_SHARE


@dataclass
class Activity:
    """When each kind was last busy, seconds since 1970; None if that cannot be known.

    Args:
        server: The Jupyter server.
    """

    server: Any
    gpus: Gpus = field(default_factory=Gpus)
    processes: Processes = field(default_factory=Processes)
    last: dict[str, float | None] = field(default_factory=dict)
    #: Whether anything was busy since the last report.
    busy: bool = False

    def __post_init__(self) -> None:
        now = time.time()
        self.last = {"kernels": now, "terminals": now, "gpus": None, "ranks": None}

    def refresh(self) -> None:
        """Read the activity again; often enough that no short computation is missed."""
        now = time.time()
        manager = self.server.kernel_manager
        kernels = [manager.get_kernel(name) for name in manager.list_kernel_ids()]
        active = [now if k.execution_state == "busy" else k.last_activity.timestamp() for k in kernels]
        self._note("kernels", max(active, default=None))
        self._note("terminals", self._terminals())
        for name, state in (("gpus", self.gpus.busy()), ("ranks", self.processes.busy())):
            if state is None:
                self.last[name] = None
            elif state or self.last[name] is None:
                self._note(name, now, count=state)

    def report(self) -> dict[str, Any]:
        """What the hub gets; begins a new interval."""
        content = {"busy_since_last": self.busy, **self.last}
        self.busy = False
        return content

    def _terminals(self) -> float | None:
        manager = self.server.web_app.settings.get("terminal_manager")
        if manager is None:
            return None
        return max((t.last_activity.timestamp() for t in manager.terminals.values()), default=None)

    def _note(self, name: str, when: float | None, count: bool = True) -> None:
        before = self.last[name]
        if when is not None and (before is None or when > before):
            self.last[name] = when
            self.busy = self.busy or count
