"""`carme-run --cleanup`: what outlives its run is ended, and nothing else is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carme_runtime.ranks import orphans
from carme_runtime.ranks.orphan_cleanup import OrphanCleanup

from .conftest import PATIENCE, Job, Process, clean_environment

Launch = Callable[..., Process]
# A rank that leaves a daemon behind, which is the program `name` of the test's folder.
LEAVES = """
import subprocess
silent = subprocess.DEVNULL
daemon = subprocess.Popen(["sh", {name!r}], start_new_session=True, stdout=silent, stderr=silent)
print(daemon.pid, flush=True)
"""


class Daemon:
    """A program with a name of its own, and so a test's `--cleanup` finds it and no other test's."""

    def __init__(self, folder: Path, text: str) -> None:
        self.path = folder / f"daemon-{os.getpid()}-{time.monotonic_ns()}.sh"
        self.path.write_text(text)
        self.script = folder / "leaves.py"
        self.script.write_text(LEAVES.format(name=str(self.path)))
        self.pids: list[int] = []

    def left_by(self, run: Process) -> list[int]:
        """The numbers of those that a run's ranks left behind."""
        code, out, errors = run.wait()
        assert code == 0, errors
        self.pids += (new := [int(line.split()[-1]) for line in out.splitlines()])
        assert all(map(is_there, new))
        return new


def is_there(pid: int) -> bool:
    """Whether the process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while is_there(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[[str], Daemon]]:
    created: list[Daemon] = []

    def make(text: str = "sleep 300 & wait") -> Daemon:
        created.append(Daemon(tmp_path, text))
        return created[-1]

    yield make
    for pid in (pid for daemon in created for pid in daemon.pids):
        if is_there(pid):
            os.killpg(pid, signal.SIGKILL)


def test_what_left_its_rank_is_ended(local: Launch, make_daemon: Callable[[], Daemon]) -> None:
    daemon = make_daemon()
    (pid,) = daemon.left_by(local(str(daemon.script)))
    code, out, errors = local("--cleanup", "--dry-run").wait()
    assert (code, errors) == (0, "")
    assert f"{pid} on " in out and f"(sh {daemon.path}) was left behind.\n" in out and is_there(pid)
    code, out, errors = local("--cleanup", "--", str(daemon.path), "argument").wait()
    assert (code, errors, out.count("\n")) == (0, "", 1)
    assert out.startswith(f"{pid} on ") and out.endswith("was ended.\n") and not is_there(pid)
    code, out, errors = local("--cleanup", str(daemon.path)).wait()
    assert (code, errors) == (0, "") and out.startswith("Nothing was left behind on ")


def test_what_does_not_listen_is_reported_and_killed_by_force(
    local: Launch, make_daemon: Callable[[str], Daemon], tmp_path: Path
) -> None:
    trapped = tmp_path / "trapped"
    daemon = make_daemon(f"trap '' TERM; : >{trapped}; while :; do sleep 1; done")
    (pid,) = daemon.left_by(local(str(daemon.script)))
    while not trapped.exists():
        time.sleep(0.02)
    code, out, errors = local("--cleanup", "--", str(daemon.path)).wait()
    assert (code, out) == (1, "")
    assert errors.startswith(f"carme-run: {pid} on ") and errors.endswith("has not ended. Add --force.\n")
    assert is_there(pid)
    code, out, errors = local("--cleanup", "--force", "--", str(daemon.path)).wait()
    assert (code, errors) == (0, "") and "was ended" in out and not is_there(pid)


def test_ranks_are_ended_when_launcher_and_cleanup_are_killed(local: Launch, tmp_path: Path) -> None:
    script = tmp_path / f"rank-{time.monotonic_ns()}.py"
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(300)")
    run = local(str(script))
    rank = int(run.line().split()[-1])
    children = Path(f"/proc/{run.popen.pid}/task/{run.popen.pid}/children").read_text().split()
    cleanups = [pid for pid in children if b"orphan_cleanup.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(cleanups) == 1
    for pid in (int(cleanups[0]), run.popen.pid):
        os.kill(pid, signal.SIGKILL)
    run.popen.wait()
    assert is_there(rank)
    code, out, errors = local("--cleanup", "--", str(script)).wait()
    assert (code, errors) == (0, "") and out.startswith(f"{rank} on ")
    wait_until_gone(rank)


@pytest.mark.parametrize("reported", [False, True])
def test_a_rank_that_a_dying_launcher_could_not_report_is_ended(reported: bool) -> None:
    entry = {"CARME_RUN": f"test:{time.monotonic_ns()}"}
    cleanup = OrphanCleanup()
    cleanup.begin()
    cleanup.expect(f"CARME_RUN={entry['CARME_RUN']}")
    rank = subprocess.Popen(["sleep", "300"], env=os.environ | entry, start_new_session=True)
    if reported:
        cleanup.watch(rank.pid)
        cleanup.forget(rank.pid)  # it would be over: what comes is not about it
    assert cleanup._process and cleanup._process.stdin
    cleanup._process.stdin.close()
    cleanup._process.wait()
    try:
        if reported:
            assert rank.poll() is None
        else:
            assert rank.wait(PATIENCE) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()


def test_a_run_that_goes_on_is_left_alone(
    job: Job, make_daemon: Callable[[], Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon()
    waits = tmp_path / "waits.py"
    waits.write_text(f"{daemon.script.read_text()}\nimport time\ntime.sleep(300)\n")
    living = job.launch("-n", "2", str(waits))
    daemons = [int(living.line().split()[-1]) for _ in range(2)]
    daemon.pids += daemons
    left = daemon.left_by(job.launch("-n", "2", str(daemon.script)))
    code, out, errors = job.launch("--cleanup", "--", str(daemon.path)).wait()
    assert (code, errors) == (0, "")
    assert sorted(int(line.split()[0]) for line in out.splitlines()) == sorted(left)
    assert {line.split()[2] for line in out.splitlines()} == {"n1", "n2"}
    assert all(map(is_there, daemons)) and living.popen.poll() is None
    living.popen.send_signal(signal.SIGTERM)
    assert living.wait()[0] == 143
    code, out, _ = job.launch("--nodes", "1", "--cleanup", "--", str(daemon.path)).wait()
    assert code == 0 and [line.split()[2] for line in out.splitlines()] == ["n1"]
    code, out, _ = job.launch("--cleanup", "--", str(daemon.path)).wait()
    assert code == 0 and [line.split()[2] for line in out.splitlines()] == ["n2"]
    assert not any(map(is_there, daemons))


def test_marks_that_mean_nothing_here_are_left_alone(tmp_path: Path) -> None:
    own = orphans.mark(3)
    namespace = own.partition("]")[0]
    gone = f"{namespace}]:{2**22 + 1}:5:1"  # more than numbers of processes go to
    marks = ["", "pid:[1]:2:3:4", f"{namespace}]:1", f"{namespace}]:a:b:c", own, gone]
    script = tmp_path / f"sleeps-{time.monotonic_ns()}.py"
    script.write_text("import time; time.sleep(300)")
    sleepers = [
        subprocess.Popen([sys.executable, str(script)], env=clean_environment(**{orphans.MARK: each}))
        for each in marks
    ]
    try:
        for number, over, expected in ((None, False, {gone}), (None, True, {gone, own})):
            found = orphans.clear(lambda run: over and run == 3, str(script), "", number)  # noqa: B023
            assert {marks[[p.pid for p in sleepers].index(each.pid)] for each in found} == expected
        found = orphans.clear(lambda run: True, str(script), own, signal.SIGTERM, PATIENCE)
        assert [(each.pid, each.ended) for each in found] == [(sleepers[-1].pid, True)]
        assert [sleeper.poll() is None for sleeper in sleepers[:-1]] == [True] * 5
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_force_needs_cleanup(local: Launch) -> None:
    code, out, errors = local("--force", "--", "true").wait()
    assert (code, out) == (2, "") and "Add --cleanup, or leave --force out" in errors
