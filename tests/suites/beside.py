"""Suites that another process of `./test` runs meanwhile; their results are in the same folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path

from suites.running import ROOT, Runner, copy_to_output, finish_end, request_end_of_group, show_stage

__all__ = ["Beside", "Role", "give_way"]

#: Seconds that they have to end what they have started; each of that has ten.
LAST_SECONDS = 30
#: The variable that names the part of a process.
VARIABLE = "CARME_BESIDE"


class Role(StrEnum):
    """What part a process has: the first, which reports at the end, or one of those that run beside it."""

    FIRST = ""
    GIVES_WAY = "gives-way"
    SECOND_USERS = "cluster"

    @classmethod
    def of_process(cls) -> Role:
        """The part that this process has."""
        return cls(os.environ.get(VARIABLE, ""))


class Beside:
    """Suites in a process of their own.

    Args:
        runner: Notes when they failed.
        label: What the report calls them where they failed.
    """

    def __init__(self, runner: Runner, label: str) -> None:
        self._runner = runner
        self._label = label
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = Path()

    def begin(self, title: str, role: Role, *suites: str) -> None:
        """Start them, under a heading; what they print is shown when they have ended."""
        show_stage(title)
        with tempfile.NamedTemporaryFile(delete=False) as printed:
            self._printed = Path(printed.name)
            # Linux weighs sessions against each other, whatever the niceness of their processes: one of its
            # own can give way.
            self._process = subprocess.Popen(
                [sys.executable, "-B", ROOT / "tests/run_suites.py", *suites],
                cwd=ROOT,
                env=os.environ | {VARIABLE: role.value},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Wait for their end and show what they printed, where they have begun."""
        if self._process is None:
            return
        if self._process.wait():
            self._runner.failed.append(self._label)
        self._process = None
        copy_to_output(self._printed)
        self._printed.unlink()

    def request_end(self) -> None:
        """Request their end, with all that they have started, if they are no longer needed."""
        if self._process is not None:
            request_end_of_group(self._process)

    def finish_end(self) -> None:
        """Wait for that end."""
        if self._process is not None:
            finish_end(self._process, LAST_SECONDS)
            self._printed.unlink(missing_ok=True)


def give_way() -> None:
    """Lower the priority below the cluster's tests; only a little, as these tests have limits, too."""
    os.setpriority(os.PRIO_PROCESS, 0, max(5, os.getpriority(os.PRIO_PROCESS, 0)))
    # sched(7): where the kernel groups processes by session.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("5")
