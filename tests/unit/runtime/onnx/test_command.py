"""`carme onnx plan`, `carme onnx run` and `carme-run --onnx`."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest

import carme_runtime
import onnx_models
from carme.cli import main as carme
from carme_runtime import profile
from carme_runtime.onnx.command import main


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.onnx"
    onnx.save(onnx_models.chain(), path)
    return path


def test_a_plan_is_printed_for_people_and_programs(model: Path, capsys: pytest.CaptureFixture[str]):
    assert carme(["onnx", "plan", str(model), "--workers", "cpu:2", "--tasks", "2", "--svg", "plan.svg"]) == 0
    assert "16 operators in 2 tasks" in capsys.readouterr().out
    assert Path("plan.svg").read_text().startswith("<svg")
    assert main(["plan", str(model), "--workers", "cpu:2,gpu:1", "--estimate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == {"cpu": 2, "gpu": 1}


def test_a_model_runs_from_file_to_file(model: Path):
    x = onnx_models.random(6, 64)
    np.savez("x.npz", x=x)
    command = [sys.executable, "-m", "carme_runtime.launcher.command", "--onnx", str(model)]
    done = subprocess.run(
        [*command, "--input", "x.npz", "--output", "y.npz", "--workers", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert "4 micro-batches" in done.stdout
    wanted = onnx_models.expected(onnx_models.chain(), {"x": x})
    np.testing.assert_allclose(np.load("y.npz")["r7"], wanted["r7"], rtol=1e-4, atol=1e-4)


def test_errors_are_sentences_and_leave_no_output(model: Path, capsys: pytest.CaptureFixture[str]):
    np.savez("x.npz", wrong=np.ones(3))
    assert main(["run", str(model), "--input", "x.npz", "--output", "y.npz"]) == 1
    assert "has no input wrong. Its inputs are x (float32[N, 64])." in capsys.readouterr().err
    assert main(["run", str(model), "--input", "none.npz", "--output", "y.npz"]) == 1
    assert "none.npz cannot be read" in capsys.readouterr().err
    Path("x.npz").write_text("text")
    assert main(["run", str(model), "--input", "x.npz", "--output", "y.npz"]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert main(["run", str(model), "--input", "x.npz", "--output", "none/y.npz"]) == 1
    assert "There is no folder" in capsys.readouterr().err
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["model.onnx", "x.npz"]


def test_a_run_that_sigterm_ends_leaves_no_folder(model: Path, tmp_path: Path):
    """As Slurm sends it at the time limit; here it comes while the program gives the first input."""
    np.savez("x.npz", x=onnx_models.random(6, 64))
    (tmp_path / "temporary").mkdir()
    Path("program.py").write_text(
        "import signal, sys\n"
        "from carme_runtime.onnx import command, running\n"
        "running._Feed._put = lambda *_: signal.raise_signal(signal.SIGTERM)\n"
        "sys.exit(command.main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "program.py", "run", str(model), "--input", "x.npz", "--output", "y.npz"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1]),
            "TMPDIR": str(tmp_path / "temporary"),
        },
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not list((tmp_path / "temporary").glob("carme-onnx-*")) and not Path("y.npz").exists()


def test_a_run_leaves_what_signals_do_as_it_was(model: Path):
    np.savez("x.npz", x=onnx_models.random(1, 64))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["run", str(model), "--input", "x.npz", "--output", "y.npz", "--workers", "1"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_trace_has_a_row_for_each_worker_and_the_micro_batch_of_each_firing(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(carme_runtime.__file__).parents[1]))
    monkeypatch.setattr(profile, "recorder", before := profile.Recorder(None, 0))  # as jobs have one
    np.savez("x.npz", x=onnx_models.random(6, 64))
    words = ["run", str(model), "--input", "x.npz", "--output", "y.npz", "--workers", "2", "--tasks", "2"]
    assert main([*words, "--trace", "html:trace.html"]) == 0
    text = Path("trace.html").read_text().split('type="application/json">')[1].split("</script>")[0]
    data = json.loads(text)
    workers = [row for row in data["rows"] if ": worker " in row["name"]]
    assert workers and {data["names"][span[2]] for row in workers for span in row["spans"]} == {
        f"{task} of micro-batch {number}" for task in ("part_0", "part_1") for number in range(4)
    }
    for row in workers:  # a worker does one thing after the other
        spans = sorted(row["spans"])
        assert all(a[0] + a[1] <= b[0] for a, b in pairwise(spans))
    assert profile.recorder is before and not list(Path().glob(".carme-trace-*"))


def test_what_was_set_for_traces_before_a_run_is_set_after_it(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(carme_runtime.__file__).parents[1]))
    monkeypatch.setenv(profile.TRACE, "of-the-job")
    monkeypatch.delenv(profile.LIMIT, raising=False)
    monkeypatch.setattr(profile, "recorder", None)
    np.savez("x.npz", x=onnx_models.random(1, 64))
    words = ["run", str(model), "--input", "x.npz", "--output", "y.npz", "--workers", "1"]
    assert main([*words, "--trace", "html:trace.html"]) == 0
    assert os.environ[profile.TRACE] == "of-the-job" and profile.LIMIT not in os.environ
    assert Path("trace.html").exists()


def test_a_run_that_cannot_begin_leaves_no_folder_and_the_recorder_of_before(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile, "recorder", before := profile.Recorder(None, 0))
    np.savez("x.npz", x=onnx_models.random(1, 64))
    words = ["run", str(model), "--input", "x.npz", "--output", "y.npz", "--trace", "html:trace.html"]
    assert main([*words, "--workers", "gpu:1"]) == 1  # no ONNX Runtime of the tests can use GPUs
    assert not list(Path().glob(".carme-trace-*"))

    def full() -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(profile, "begin", full)
    with pytest.raises(OSError, match="No space left"):
        main([*words, "--workers", "1"])
    assert profile.recorder is before and profile.TRACE not in os.environ
    assert not list(Path().glob(".carme-trace-*"))
