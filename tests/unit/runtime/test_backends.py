"""What --backend sets for each framework, without the frameworks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from carme_runtime.launcher.backends import BACKENDS

from .conftest import Process, clean_environment

Script = Callable[[str], str]
Launch = Callable[..., Process]


@pytest.mark.parametrize("name", ["torch", "gaspi"])
def test_a_dry_run_says_what_a_backend_sets(local: Launch, script: Script, name: str) -> None:
    code, out, errors = local("--dry-run", "-n", "2", "--backend", name, script("1 / 0")).wait()
    assert (code, errors) == (0, "")
    assert f"--backend {name} sets: {', '.join(BACKENDS[name].sets)}" in out and "starts: nothing" in out


def test_ranks_of_tensorflow_know_each_other(local: Launch, script: Script, tmp_path: Path) -> None:
    for module in BACKENDS["tensorflow"].modules:
        (tmp_path / f"{module}.py").touch()
    path = script("import os; print(os.environ['TF_CONFIG'])")
    folders = f"{clean_environment()['PYTHONPATH']}:{tmp_path}"
    code, out, errors = local("-n", "3", "--backend", "tensorflow", path, PYTHONPATH=folders).wait()
    assert (code, errors) == (0, "")
    told = [json.loads(line.partition("] ")[2]) for line in out.splitlines()]
    assert sorted(one["task"]["index"] for one in told) == [0, 1, 2]
    workers = told[0]["cluster"]["worker"]
    assert len(set(workers)) == 3 and all(one["cluster"]["worker"] == workers for one in told)
