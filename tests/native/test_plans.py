"""`carme-run --plan` and `--strategy` with scripts of PyTorch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memory_cgroups import MemoryCgroup
from patience import HANG

SECONDS = 2 * HANG
pytestmark = pytest.mark.timeout(3 * HANG)
PROGRAM = Path(__file__).parent / "programs/planned.py"


MIB = 1 << 20


def carme_run(*arguments: str, cgroup: MemoryCgroup | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", *arguments]
    enter = cgroup.enter if cgroup else None
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, preexec_fn=enter
    )


def test_plan_is_all_that_is_printed():
    done = carme_run("--plan", "--strategy", "pipeline", str(PROGRAM))
    assert done.returncode == 0, done.stderr
    assert "2 stages x 1 replicas, 2 micro-batches of 6 samples" in done.stdout
    assert "Predicted step:" in done.stdout and "Memory of each rank for its stage: at most" in done.stdout
    assert "replica" not in done.stdout.replace("1 replicas", "") and "trained" not in done.stdout
    assert done.stdout.count("Strategy: pipeline") == 1


@pytest.mark.parametrize("kind", [(), ("graph",), ("large",)], ids=["measured", "graph", "large"])
def test_a_model_is_measured_while_all_ranks_compute_as_in_training(launcher, tmp_path: Path, kind):
    """Else rank 0 has the node's memory, caches and clock for itself, and predicted steps are too short.

    Nobody computes where nothing is measured, or where there is too little memory for all of them.
    """
    (folder := tmp_path / "computed").mkdir()
    ranks = launcher.run("measured_beside", [0, 0], str(folder), *kind)
    assert ranks.output().count("trained") == 2, ranks.output()


def test_strategy_of_the_command_line_is_trained_with():
    done = carme_run("--strategy", "data", str(PROGRAM))
    assert done.returncode == 0, done.stderr
    assert "replica 1 of 2" in done.stdout and done.stdout.count("trained") == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--plan", str(PROGRAM), "--alone"), "The script trains without pipeline(), so there is no plan."),
        (("--strategy", "pipeline", str(PROGRAM), "--alone"), "so its model is not cut into stages."),
        (("--plan", "--strategy", "hybrid", str(PROGRAM)), "2 ranks cannot train as a hybrid"),
    ],
)
def test_a_script_without_a_plan_gets_a_sentence(arguments: tuple[str, ...], sentence: str):
    done = carme_run(*arguments)
    assert done.returncode != 0
    assert sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "[rank 1]" not in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.parametrize("option", [(), ("--joins",)], ids=["pipeline", "script"])
def test_a_port_in_use_is_reported_in_a_sentence(option: tuple[str, ...]):
    done = carme_run("--plan", str(PROGRAM), "--taken", *option)
    assert done.returncode != 0
    found = re.search(
        r"carme-run --plan: Rank 0 cannot listen at port \d+ of 127\.0\.0\.1, where .*", done.stderr
    )
    assert found and "another process uses it. Start the program again" in found[0], done.stderr
    # Where the script itself joins the ranks, PyTorch's own error comes before.
    assert ("Traceback" in done.stderr) == bool(option), done.stderr


def test_a_port_in_use_is_reported_in_training_too():
    done = carme_run(str(PROGRAM), "--taken")
    assert done.returncode != 0
    assert "Rank 0 cannot listen at port" in done.stderr and "EADDRINUSE" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("raise OSError('the port is taken')", "The script failed before it called pipeline();"),
        ("raise SystemExit(3)", "The script ended without a call of pipeline(),"),
    ],
)
def test_a_script_that_fails_before_its_plan_shows_its_own_error_first(
    tmp_path: Path, end: str, sentence: str
):
    (program := tmp_path / "script.py").write_text(f"import torch\n{end}\n")
    done = carme_run("--plan", "-n", "1", str(program))
    assert done.returncode in (1, 3)
    errors, found, _ = done.stderr.partition(f"carme-run --plan: {sentence}")
    assert found, done.stderr
    assert ("OSError: the port is taken" in errors) == ("OSError" in end), done.stderr


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_keras_scripts_follow_the_command_line(monkeypatch: pytest.MonkeyPatch, backend: str):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    program = str(PROGRAM.with_name("planned_keras.py"))
    done = carme_run("--plan", "--strategy", "pipeline", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 stages x 1 replicas") == 1 and "trained" not in done.stdout
    done = carme_run("--strategy", "pipeline", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained pipeline") == 2


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_keras_scripts_that_cannot_be_cut_get_a_sentence(monkeypatch: pytest.MonkeyPatch, backend: str):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    done = carme_run("--plan", str(PROGRAM.with_name("planned_keras.py")), "unknown")
    assert done.returncode != 0
    assert "carme-run --plan: The model sequential cannot be cut into stages: it is not" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_keras_scripts_train_by_the_strategies_that_their_ranks_allow(
    monkeypatch: pytest.MonkeyPatch, backend: str
):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    program = str(PROGRAM.with_name("planned_keras.py"))
    done = carme_run("--strategy", "data", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained with all layers on each rank") == 2, done.stdout
    done = carme_run("--plan", program)  # which strategy wins is up to what is measured
    assert done.returncode == 0, done.stderr
    assert re.search(r"Strategy: (data|pipeline)\.", done.stdout), done.stdout
    assert "trained" not in done.stdout, done.stdout
    done = carme_run("--plan", "--strategy", "hybrid", program)
    assert done.returncode != 0
    assert "carme-run --plan: 2 ranks cannot train as a hybrid" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_a_plan_leaves_room_for_what_runs_beside_it_in_the_job(cgroup: MemoryCgroup):
    """A job of 2200 MiB; a session's server has 1200 of them."""
    cgroup.limit(2200 * MIB)
    hold = f"memory = bytearray(b'x') * {1200 * MIB}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=cgroup.enter,
    ) as server:
        assert server.stdout and server.stdin
        server.stdout.readline()
        done = carme_run("--plan", str(PROGRAM), cgroup=cgroup)
        assert done.returncode == 0, done.stderr
        server.stdin.write("\n")
    found = re.search(r"Memory of each rank for its stage: at most ([\d.]+) MiB", done.stdout)
    assert found, done.stdout
    # Of the rest both ranks have PyTorch, too, and a margin.
    assert 100 < float(found[1]) < (2200 - 1200) / 2 - 32


def test_densenet_121_is_planned_in_seconds():
    program = str(PROGRAM.with_name("planned_densenet.py"))
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["operators"] > 400 and found["plan_s"] < 10, found
    assert max(found["tight"]["memory"]) <= found["memory"] < max(found["free"]["memory"]), found
