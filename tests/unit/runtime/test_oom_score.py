"""Whom Linux ends when memory runs out: ranks, before kernels, before a session's server."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from carme_runtime import oom_score
from memory_cgroups import MemoryCgroup
from patience import HANG

from .conftest import MEET, RUN, Job, Process, Witness, clean_environment

Launch = Callable[..., Process]
MIB = 1 << 20
SCORE = "/proc/self/oom_score_adj"
# Its own value, and that of what it starts.
SHOW = f"""
import subprocess
from pathlib import Path
child = subprocess.run(["cat", {SCORE!r}], capture_output=True, text=True, check=True)
print("SCORES", Path({SCORE!r}).read_text().strip(), child.stdout.strip(), flush=True)
"""
WAIT = SHOW + "import signal\nsignal.pause()\n"
KERNEL = """
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

InteractiveShell.instance().run_cell("%load_ext carme_runtime.notebook")
print("SCORES", Path("/proc/self/oom_score_adj").read_text().strip())
"""


def score(process: int | str = "self") -> int:
    return int(Path(f"/proc/{process}/oom_score_adj").read_text())


def at_least(value: int) -> int:
    """What a process has that raises its value in an environment like this one."""
    return max(value, score())


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def scores(line: str) -> list[int]:
    return [int(each) for each in line.partition("SCORES ")[2].split()]


def test_ranks_and_what_they_start_go_before_the_launcher(
    local: Launch, script: Callable[[str], str]
) -> None:
    run = local(script(WAIT))
    assert scores(run.line()) == [at_least(oom_score.RANK)] * 2
    assert score(run.popen.pid) == score()
    # The rank, and what cleans up after it.
    assert {score(pid) for pid in children(run.popen.pid)} == {at_least(oom_score.RANK)}
    assert len(children(run.popen.pid)) == 2


def test_agents_and_the_jobs_command_stay_where_they_are(job: Job, script: Callable[[str], str]) -> None:
    run = job.launch("-n", "2", script(WAIT))
    assert [scores(run.line()) for _ in range(2)] == [[at_least(oom_score.RANK)] * 2] * 2
    agents = [job.first.popen.pid, *(agent.popen.pid for agent in job.joined)]
    assert {score(agent) for agent in agents} == {score()}
    # The first child of the first agent is the job's command: in sessions the server.
    assert score(children(agents[0])[0]) == score()
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 128 + signal.SIGTERM


def test_mpirun_goes_with_its_ranks(local: Launch, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("mpirun", f"echo 'mpirun (Open MPI) 5.0'; cat {SCORE}"), ("carme-remote", "exit 1")):
        program = programs / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    code, out, errors = local("--backend", "mpi", "-n", "1", "--", "true", PATH=path).wait()
    assert code == 0, errors
    assert int(out.splitlines()[-1]) == at_least(oom_score.RANK)


def test_kernels_go_before_their_server_and_after_ranks(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    environment = clean_environment(IPYTHONDIR=str(tmp_path / "ipython"))
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    assert scores(done.stdout.splitlines()[-1]) == [at_least(oom_score.KERNEL)]
    assert 0 < oom_score.KERNEL < oom_score.RANK


def test_a_value_that_is_higher_stays() -> None:
    text = (
        "from carme_runtime import oom_score\n"
        "oom_score.raise_own(900)\n"
        "oom_score.raise_own(oom_score.RANK)\n"
        "with oom_score.children_at(oom_score.RANK): pass\n" + SHOW
    )
    out = subprocess.run(
        [sys.executable, "-c", text],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    ).stdout
    assert scores(out) == [at_least(900)] * 2


def test_a_cleanup_that_was_ended_comes_again_with_the_next_run(
    make_job: Callable[..., Job], script: Callable[[str], str], witness: Witness
) -> None:
    job = make_job("n1")
    agent = job.first.popen.pid
    rank = script(MEET + "witness.recv(2)")

    def cleanup() -> int:
        found = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(agent)}
        (pid,) = [pid for pid, command in found.items() if b"orphan_cleanup.py" in command]
        return pid

    job.launch("-n", "1", rank, environment=witness.environment)
    witness.expect(1)
    ended = cleanup()
    has_ended = os.pidfd_open(ended)
    os.kill(ended, signal.SIGKILL)
    assert select.select([has_ended], [], [], HANG)[0]
    os.close(has_ended)
    job.launch("-n", "1", rank, environment=witness.environment)
    witness.expect(1)
    assert cleanup() != ended
    os.kill(agent, signal.SIGKILL)
    assert witness.all_gone()  # the rank of the first run as well


# Has more memory than the rank will have, and answers for as long as it lives.
SERVER = f"""
import sys
memory = bytearray(b"x") * ({140 * MIB})
print("ready", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
OVERRUN = "memory = []\nwhile True: memory.append(bytearray(b'x') * (1 << 20))\n"


def test_a_rank_that_overruns_is_ended_and_a_larger_server_beside_it_lives(
    cgroup: MemoryCgroup, script: Callable[[str], str]
) -> None:
    cgroup.limit(256 * MIB)
    overrun = script(OVERRUN)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=cgroup.enter,
    )
    with server:
        assert server.stdin and server.stdout
        assert server.stdout.readline() == "ready\n"
        for attempt in range(5):
            run = subprocess.run(
                [*RUN, overrun],
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=HANG,
                check=False,
                preexec_fn=cgroup.enter,
            )
            assert run.returncode == 128 + signal.SIGKILL, run.stderr
            assert re.search(r"Rank 0 on \S+ was killed by signal 9 \(SIGKILL\)", run.stderr), run.stderr
            server.stdin.write(f"{attempt}\n")
            server.stdin.flush()
            assert server.stdout.readline() == f"{attempt}\n"
        server.stdin.close()
        assert server.wait(HANG) == 0
