"""The demo cluster's hosts, which come up while all else is prepared."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from suites.running import ROOT, Output, Runner, finish_end, request_end_of_group, show_stage

__all__ = ["ON_DEMO", "DemoHosts"]

#: Suites that run on the demo cluster.
ON_DEMO = {"cluster", "browser", "security", "monitoring", "faults", "frameworks", "end-to-end"}
#: Seconds that `./demo up` and what it has started have to end; the next `./demo up` mends what they leave.
LAST_SECONDS = 60
#: The stage of `./demo up` at which all that it installs on this host is there.
INSTALLED = b"remains of a sudden end"


class DemoHosts:
    """The hosts of `./demo up`.

    Args:
        suites: What runs. With Prometheus from the beginning the hosts are set up once for all suites.
        runner: Runs the command, and notes how it ended.
    """

    def __init__(self, suites: Iterable[str], runner: Runner) -> None:
        self._runner = runner
        self._are_needed = bool(ON_DEMO & set(suites))
        has_metrics = bool({"security", "monitoring"} & set(suites))
        self._command = ["./demo", "up", "--no-run", *(["--monitoring"] if has_metrics else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = Path()

    def begin(self) -> None:
        """Start them in the background if a suite needs them; `bring_up` shows their output."""
        if not self._are_needed:
            return
        show_stage("The demo's hosts come up meanwhile")
        with tempfile.NamedTemporaryFile(delete=False) as printed:
            self._printed = Path(printed.name)
            # In a group of its own: what interrupts us ends it by `request_end`.
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        # apt works for one at a time: what this machine lacks for the demo is installed first.
        while self._process.poll() is None and INSTALLED not in self._printed.read_bytes():
            time.sleep(0.2)

    def bring_up(self, suite: str) -> None:
        """Wait until they are up, for this suite."""
        name = f"{suite}: ./demo up"
        if self._process is None:
            self._runner.run(name, *self._command)
        else:
            self._runner.run_steps(name, self._wait)

    def _wait(self, output: Output) -> int:
        assert self._process is not None
        code = self._process.wait()
        self._process = None
        output.write(self._printed.read_bytes())
        self._printed.unlink()
        return code

    def request_end(self) -> None:
        """Request the end of the command that starts them, if it is no longer needed."""
        if self._process is not None:
            request_end_of_group(self._process)

    def finish_end(self) -> None:
        """Wait for that end."""
        if self._process is not None:
            finish_end(self._process, LAST_SECONDS)
            self._printed.unlink(missing_ok=True)
