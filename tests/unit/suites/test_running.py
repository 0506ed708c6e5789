"""Commands that the suites run: their exit codes, limits and outputs."""

import os
import signal
import sys
from pathlib import Path

import pytest

import results
from suites import running
from suites.running import Runner


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


def test_a_command_that_ignores_its_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "LAST_SECONDS", 0.1)
    file = tmp_path / "pid"
    script = f"trap '' TERM; echo $$ >{file}; while :; do sleep 0.1; done"
    assert running.call("sh", "-c", script, limit=2) == 124
    assert not Path(f"/proc/{file.read_text().strip()}").exists()


def test_what_a_suite_prints_is_shown_and_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = Runner(tmp_path)
    runner.run("unit: a part", "sh", "-c", "echo out; echo err >&2; exit 2")
    runner.run("native", "sh", "-c", "echo $VARIABLE; pwd", environment={"VARIABLE": "x"}, folder=tmp_path)
    shown = capfd.readouterr().out
    assert "== unit: a part (" in shown and "out\nerr\n-- unit: a part took 0 s\n" in shown
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
        assert Path(f"/proc/{pid}").exists() and results.read(tmp_path)[0].output == "done"
    finally:
        os.kill(pid, signal.SIGKILL)
