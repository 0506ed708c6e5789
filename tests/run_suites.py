"""The program of `./test`: prepare, run, report once. Python's own library is enough for it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import results as reports
from suites.arguments import USAGE, Request, parse
from suites.beside import Role, give_way
from suites.demo_hosts import DemoHosts
from suites.environments import prepare_tests
from suites.plan import Plan, run_quick_lint, use
from suites.running import ROOT, Runner, Stop, report, show_stage
from suites.unchanged import ALL

__all__ = ["main"]

#: Names the folder of results for the processes that run beside, and for tests that leave a file in it.
RESULTS = "CARME_RESULTS"


def main(words: Sequence[str]) -> int:
    """Run what the command line names.

    Args:
        words: The words of the command line.

    Returns:
        The exit code: 0, 1 where something failed, 2 for a wrong call or where something is missing, that of
        a program that SIGPIPE has ended where nobody reads what this one prints any more.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup(1)
            signal.signal(number, _stop)
    try:
        request = parse(words)
        if request.help:
            print(USAGE.read_text(), end="")
            return 0
        if request.quick is not None:
            use(prepare_tests())
            return run_quick_lint(request.quick)
        return _run(request, Role.of_process())
    except Stop as stop:
        report(str(stop))
        return stop.code
    except KeyboardInterrupt:
        report("Interrupted.")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _leave_closed_outputs()
        return 128 + signal.SIGPIPE


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End by a signal in the way of an error, so that nothing is left running."""
    _ignore_signals()
    raise SystemExit(128 + number)


def _ignore_signals() -> None:
    """Let no further one interrupt the end of what runs; each wait of it has a limit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _leave_closed_outputs() -> None:
    """Print nowhere from now on what would go to a pipe that nobody reads.

    Neither our end nor Python's own, which writes what is left in its buffers, fails because of it.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before Python began
            continue
        poll = select.poll()
        poll.register(stream, 0)  # errors are reported unasked
        if poll.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _run(request: Request, role: Role) -> int:
    runner = Runner(_results_folder(role))
    if request.all:
        os.environ[ALL] = "yes"
    hosts = DemoHosts(request.suites, runner)
    plan: Plan | None = None
    try:
        if role is Role.GIVES_WAY:
            give_way()
        if role is Role.FIRST:
            hosts.begin()
        python = prepare_tests()
        use(python)
        plan = Plan(request, runner, role, python, hosts)
        plan.run()
    finally:
        _ignore_signals()
        _leave_closed_outputs()
        # All end at the same time: none waits for the last seconds of another one.
        hosts.request_end()
        if plan:
            plan.request_end()
            plan.finish_end()
        hosts.finish_end()
    if role is Role.FIRST:
        show_stage("Results of the suites")
        reports.report(runner.results)
    if runner.failed:
        sys.stdout.flush()
        print("\nFailed: " + "".join(f"{name}; " for name in runner.failed), file=sys.stderr)
        return 1
    print(f"\nAll passed: {' '.join(request.suites)}")
    return 0


def _results_folder(role: Role) -> Path:
    """Where the suites' results go: those that run beside use the folder of the first."""
    if role is not Role.FIRST:
        return Path(os.environ[RESULTS])
    folder = ROOT / "artifacts/results"
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError:  # those there are another user's
        folder = Path(tempfile.mkdtemp())
    os.environ[RESULTS] = str(folder)
    return folder


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    raise SystemExit(main(sys.argv[1:]))
