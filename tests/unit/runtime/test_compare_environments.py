"""The comparison: Pythons and servers of contestants, and the cores that their ranks have."""

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from carme_runtime.compare import command, entries, hosts, pythons, worker
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.machine import ENTRY, companions, used_seconds
from carme_runtime.errors import CarmeRuntimeError


def fake_python(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_of_its_own_reports_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = fake_python(
        tmp_path,
        f'export PYTHONPATH="{Path(pythons.__file__).parents[2]}:$PYTHONPATH"\nexec {sys.executable} "$@"',
    )
    # Modules of this Python must not be taken for the other's.
    (tmp_path / "leak").mkdir()
    (tmp_path / "leak/mxnet.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "leak"))
    assert pythons.missing(interpreter, ("carme_runtime", "json", "mxnet")) == ("mxnet",)
    assert CONTESTANTS["mxnet"].missing(interpreter) == ["mxnet"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "its answer is not that of a Python"),
        ("echo no such library >&2; exit 3", "no such library"),
        ("exit 3", "exit code 3"),
        ('echo \'{"lacking": [], "version": "0.0.1"}\'', "has carme_runtime 0.0.1, and this comparison has"),
    ],
)
def test_an_unsuitable_python_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = fake_python(tmp_path, text)
    options = command.parser().parse_args(["mxnet", "--python", f"mxnet={path}"])
    with pytest.raises(CarmeRuntimeError, match=re.escape(message)):
        command.plan_of(options).check()


@pytest.mark.parametrize("text", ["mxnet", "mxnet=", "pytorch=/usr/bin/python3", "=/usr/bin/python3"])
def test_a_python_that_cannot_be_read_is_refused(text: str) -> None:
    options = command.parser().parse_args(["--python", text])
    with pytest.raises(CarmeRuntimeError, match=f"--python {text} cannot be read"):
        command.plan_of(options)


def test_a_contestant_runs_with_its_own_python() -> None:
    plan = command.plan_of(command.parser().parse_args(["--python", "mxnet=/opt/old/bin/python"]))
    assert plan.python_of("mxnet") == "/opt/old/bin/python" and plan.python_of("jax") == sys.executable
    assert entries.command("mxnet", 2, Path("task"), plan.python_of("mxnet"))[0] == "/opt/old/bin/python"
    own = pythons.environment_of("/opt/old/bin/python", {"PYTHONPATH": "/mine", "PATH": "/bin", "HOME": "/h"})
    assert own == {"PATH": "/opt/old/bin:/bin", "HOME": "/h"}


def test_the_work_of_a_contestants_servers_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither that of ranks, which have cores of their own, nor that of other contestants."""
    monkeypatch.setenv(ENTRY, "mxnet-2")
    monkeypatch.setenv("CARME_COMPARE_SECRET", secrets.token_hex())
    monkeypatch.setenv("RANK", "0")  # this process is a rank
    starter = {name: value for name, value in os.environ.items() if name != "RANK"}
    server = {**starter, "DMLC_ROLE": "server"}
    work = [sys.executable, "-c", "print(sum(range(5_000_000)), flush=True); input()"]
    several = [
        subprocess.Popen(work, env=each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for each in (
            server,
            {**starter, "DMLC_ROLE": "scheduler"},
            {**starter, "DMLC_ROLE": "worker", "RANK": "1"},
            {**server, ENTRY: "jax-2"},
            starter,
        )
    ]
    try:
        for process in several:
            assert process.stdout is not None
            process.stdout.readline()
        assert sorted(companions()) == sorted(each.pid for each in several[:2])
        assert used_seconds(companions()) > 0
    finally:
        for process in several:
            process.kill()
            process.communicate()
    assert used_seconds([1 << 30]) == 0


def test_the_ranks_of_a_node_share_the_work_of_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of several would hide as much of others' work as the servers did."""
    seconds = iter((0.0, 8.0, 10.0, 18.0))
    monkeypatch.setattr(worker, "used_seconds", lambda servers: next(seconds) if servers else 0.0)
    busy = iter((0.0, 8.0, 0.0, 8.0))
    monkeypatch.setattr(worker, "busy_seconds", lambda cores: next(busy))
    clock = iter(range(100))
    fixed = SimpleNamespace(perf_counter=lambda: float(next(clock)), process_time=lambda: 0.0)
    monkeypatch.setattr(worker, "time", fixed)
    alone, one_of_two = (
        worker.Steps(lambda number, mark: 0.0, 0, {0}, [1], size).make(1)["foreign"] for size in (1, 2)
    )
    assert alone == 0 and one_of_two > 1


def test_ranks_on_nodes_that_are_containers_of_one_host_share_its_cores() -> None:
    assert hosts.share([("host", [0, 1]), ("host", [0, 1])]) == 1
    assert hosts.share([("a", [0, 1, 2, 3]), ("b", [0, 1, 2, 3])]) == 4
    assert hosts.share([("a", [0, 1, 2, 3]), ("b", [0, 1]), ("a", [0, 1, 2, 3])]) == 2
    assert hosts.share([("host", [0])] * 3) == 1


def test_ranks_count_their_cores_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(hosts.__file__).parents[2]))
    cores = len(os.sched_getaffinity(0))
    assert hosts.threads_of(entries.LAUNCH, 1) == cores
    assert hosts.threads_of(entries.LAUNCH, 2) == max(1, cores // 2)
    with pytest.raises(CarmeRuntimeError, match="2 ranks cannot be started: no ranks today"):
        hosts.threads_of([sys.executable, "-c", "import sys; sys.exit('carme-run: no ranks today')"], 2)
