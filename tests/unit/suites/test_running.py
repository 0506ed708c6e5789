"""Commands that the suites run: their exit codes, limits and outputs."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import results
from suites import core, demo_hosts, running
from suites.running import Output, Runner

from .conftest import has_ended, wait_until


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 128 + signal.SIGKILL)],
)
def test_exit_codes_are_those_of_a_shell(script: str, code: int) -> None:
    assert running.call("sh", "-c", script) == code


def test_a_missing_program_is_a_failure_with_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    assert running.call("/nowhere/program") == 127
    assert capfd.readouterr().err == "test: /nowhere/program cannot be started: No such file or directory.\n"


def test_a_command_ends_at_its_limit(capfd: pytest.CaptureFixture[str]) -> None:
    assert running.call(sys.executable, "-c", "import time; time.sleep(3600)", limit=1) == 124
    assert "It was stopped after 1 s: " in capfd.readouterr().err


def test_a_command_that_ignores_its_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LAST_SECONDS", 0.1)
    begun = tmp_path / "begun"
    script = f"trap '' TERM; touch {begun}; while :; do sleep 0.1; done"
    process = subprocess.Popen(["sh", "-c", script])
    try:
        wait_until(begun.exists)
        running.end(process)
        assert process.returncode == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_hosts_end_with_all_that_brings_them_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_hosts, "ROOT", tmp_path)
    (tmp_path / "demo").write_text(
        f"#!/bin/sh\nsleep 3600 &\necho $! >{tmp_path}/pid\necho Look for remains of a sudden end\nwait\n"
    )
    (tmp_path / "demo").chmod(0o755)
    hosts = demo_hosts.DemoHosts(["cluster"], Runner(tmp_path))
    hosts.begin()
    pid = int((tmp_path / "pid").read_text())
    try:
        assert not has_ended(pid)
        hosts.request_end()
        hosts.finish_end()
        wait_until(lambda: has_ended(pid))
    finally:
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_a_suite_prints_is_shown_and_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = Runner(tmp_path)
    runner.run("unit: a part", "sh", "-c", "echo out; echo err >&2; exit 2")
    runner.run("native", "sh", "-c", "echo $VARIABLE; pwd", environment={"VARIABLE": "x"}, folder=tmp_path)
    shown = capfd.readouterr().out
    assert "== unit: a part (" in shown
    assert re.search(r"out\nerr\n-- unit: a part took \d+ s\n", shown)
    first, second = results.read(tmp_path)
    assert (first.name, first.code, first.output) == ("unit: a part", 2, "out\nerr")
    assert (second.code, second.output) == (0, f"x\n{tmp_path}")
    assert runner.failed == ["unit: a part"]


def test_steps_after_a_failure_do_not_run(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.run_steps(
        "native", lambda output: output.call("sh", "-c", "exit 4") or output.call("touch", tmp_path / "later")
    )
    assert results.read(tmp_path)[0].code == 4
    assert not (tmp_path / "later").exists()


def test_a_process_that_holds_the_output_delays_no_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LAST_SECONDS", 0.1)
    runner = Runner(tmp_path)
    runner.run("unit", "sh", "-c", f"sleep 3600 & echo $! >{tmp_path}/pid; echo done")
    pid = int((tmp_path / "pid").read_text())
    try:
        assert not has_ended(pid)
        wait_until(lambda: results.read(tmp_path)[0].output == "done")
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_goes_wrong_before_a_build_is_saved_with_its_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_has_libfuzzer", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    tools = tmp_path / "native/bin"
    tools.mkdir(parents=True)
    (tools / "cmake").write_text("#!/bin/sh\necho found; echo nothing is right >&2; exit 6\n")
    (tools / "cmake").chmod(0o755)
    runner = Runner(tmp_path)
    steps: dict[str, Callable[[Output], int]] = {
        "native: threads": lambda output: core.sanitized(output, tools.parent, "thread"),
        "native: frames": lambda output: core.fuzzed(output, tools.parent),
        "native: nothing": lambda output: output.call(tools / "ninja"),
        "native: long": lambda output: output.call("sleep", "3600", limit=0.1),
    }
    for name, step in steps.items():
        runner.run_steps(name, step)
    built, fuzzed, missing, stopped = results.read(tmp_path)
    assert (built.code, built.output) == (6, "nothing is right")
    assert "There is no clang++ with libFuzzer" in fuzzed.output
    assert (missing.code, stopped.code) == (127, 124)
    assert "ninja cannot be started" in missing.output and "It was stopped after 0 s" in stopped.output
