"""Programs on hosts; here the host is this machine."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_programs
import pytest
from host_programs import HostPrograms

from patience import HANG

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ENVIRONMENT = {"PATH": os.environ["PATH"], "LC_ALL": "C"}


@pytest.fixture
def programs() -> HostPrograms:
    return HostPrograms(lambda host, words: ["env", f"HOST={host}", *words], ENVIRONMENT)


@pytest.fixture
def run(programs: HostPrograms) -> Run:
    def run(*words: str, host: str = "n1", **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"data": None, "check": False, "timeout": HANG} | options
        return programs.run(host, list(words), **options)

    return run


def test_what_a_program_prints_and_how_it_ends_is_reported(run: Run) -> None:
    done = run("sh", "-c", "cat; echo $HOST; echo no >&2; exit 3", data="gr\u00fcn\r\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "gr\u00fcn\nn1\n", "no\n")
    assert run("sh", "-c", "kill -9 $$").returncode == 137
    assert run("cat").stdout == ""  # its input has ended
    missing = run("no-such-program")
    assert (missing.returncode, missing.stderr) == (127, "no-such-program: No such file or directory\n")
    with pytest.raises(AssertionError, match=r"'false'.* on n1 ended with 1"):
        run("false", check=True)


def test_a_program_has_the_environment_of_its_host(run: Run) -> None:
    found = dict(line.split("=", 1) for line in run("env").stdout.splitlines())
    assert found == ENVIRONMENT | {"HOST": "n1"}


def test_programs_of_a_host_share_what_starts_them(run: Run) -> None:
    parent = ("sh", "-c", "echo $PPID")
    first = run(*parent).stdout
    assert run(*parent).stdout == first != run(*parent, host="n2").stdout


def test_what_a_program_leaves_running_holds_nobody_up(run: Run) -> None:
    left = int(run("sh", "-c", f"sleep {10 * HANG:.0f} & echo $!").stdout)
    os.kill(left, 9)


def test_a_program_ends_with_its_time(run: Run, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as ended:
        run("sh", "-c", f"echo begun; echo $$ > {tmp_path}/pid; exec sleep {HANG}", timeout=1)
    assert ended.value.output in ("begun\n", "")  # a busy machine may need longer than that
    if (pid := tmp_path / "pid").exists():
        assert not Path("/proc", pid.read_text().strip()).exists()
    assert run("echo", "next").stdout == "next\n"


def test_a_host_that_goes_down_and_comes_up_again(run: Run, tmp_path: Path) -> None:
    """The program that it goes down with does not run again."""
    last = f"echo ran >> {tmp_path}/runs; kill -9 $PPID"
    done = run("sh", "-c", last)
    assert (done.returncode, done.stdout) == (137, "")
    assert (tmp_path / "runs").read_text() == "ran\n"
    assert run("echo", "up again").stdout == "up again\n"


def test_a_paused_host_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With podman's message; the program for the paused host does not run when the host resumes."""
    monkeypatch.setattr(host_programs, "ANSWER", 0.1)
    paused = tmp_path / "paused"
    inside = f'[ -e {paused} ] && {{ echo paused >&2; exit 125; }}; exec "$@"'
    programs = HostPrograms(lambda _, words: ["sh", "-c", inside, "sh", *words], ENVIRONMENT)
    server = int(programs.run("n1", ["sh", "-c", "echo $PPID"], data=None, check=False, timeout=HANG).stdout)
    paused.touch()
    os.kill(server, signal.SIGSTOP)
    words = ["touch", f"{tmp_path}/ran"]
    try:
        done = programs.run("n1", words, data=None, check=False, timeout=HANG)
        assert (done.returncode, done.stderr) == (125, "paused\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGCONT)
    paused.unlink()
    assert programs.run("n1", ["true"], data=None, check=False, timeout=HANG).returncode == 0
    assert not (tmp_path / "ran").exists()


def test_podman_reports_why_a_host_is_down() -> None:
    """With podman's message."""
    down = HostPrograms(lambda host, words: ["sh", "-c", f"echo {host} is down >&2; exit 125"], ENVIRONMENT)
    done = down.run("n1", ["true"], data=None, check=False, timeout=HANG)
    assert (done.returncode, done.stderr) == (125, "n1 is down\n")


def test_threads_run_programs_at_the_same_time(run: Run, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    os.mkfifo(tmp_path / "meeting")
    with ThreadPoolExecutor(2) as threads:
        # Each waits for the other.
        reads = threads.submit(run, "cat", str(tmp_path / "meeting"))
        writes = threads.submit(run, "sh", "-c", f"echo met > {tmp_path}/meeting")
        assert writes.result(HANG).returncode == 0
        assert reads.result(HANG).stdout == "met\n"
