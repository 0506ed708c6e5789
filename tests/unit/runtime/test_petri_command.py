"""`carme net`: a net that a script defines is run, watched, fed and resumed by commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import carme_runtime
from carme.cli import main as carme
from carme_runtime.petri import Net, PetriError
from carme_runtime.petri.command import main
from patience import HANG

SCRIPT = """
import os, sys
from pathlib import Path
from carme_runtime.petri import Net

class Mesh:
    pass

net = Net("squares")
numbers, squares = net.place("numbers", int), net.place("squares", int)
names, meshes, things = net.place("names", str), net.place("meshes", Mesh), net.place("things")

@net.transition(numbers >> squares)
def square(number):
    if number == 7:
        open(os.environ["GATE"]).read()  # until the test closes its end
    return number * number

if __name__ == "__main__":
    sys.exit("not as a module")
"""
COMMAND = [sys.executable, "-m", "carme_runtime.petri"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "squares.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@contextlib.contextmanager
def running(script: Path, folder: Path, *more: str) -> "Iterator[subprocess.Popen[str]]":
    """A program that runs the net, ended at last."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1]),
        "GATE": str(folder.with_name("gate")),
    }
    command = [*COMMAND, "run", str(script), "--folder", str(folder), "--workers", "1", *more]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    try:
        assert process.stderr.readline() == f"The run is in {folder}.\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_net_is_run_to_its_end(script: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["run", str(script), "--folder", str(folder), "--put", "numbers=3", "--put", "numbers=4"]
    assert carme(["net", *words]) == 0
    out = capsys.readouterr().out
    assert f"Net squares in {folder}: resting.\nplace    tokens\nnumbers       0\nsquares       2\n" in out
    assert "transition  ended  running\nsquare          2        0\n" in out
    assert main(["status", str(folder), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "ended" and status["places"]["squares"] == 2
    assert main(["resume", str(folder), "--json", "--put", "numbers=5"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["tokens"]["squares"]) == [9, 16, 25]


def test_another_program_watches_and_feeds_it(
    script: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    os.mkfifo(folder.with_name("gate"))
    with running(script, folder, "--put", "numbers=7", "--stay") as process:
        gate = os.open(folder.with_name("gate"), os.O_WRONLY)  # the task has begun
        assert main(["status", str(folder), "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["state"] == "running" and status["running"] == {"square": 1}
        assert main(["status"]) == 0
        assert str(folder) in capsys.readouterr().out
        monkeypatch.setattr(sys, "stdin", (folder / "output.log").with_name("lines").open("w+"))
        print("8\n9", file=sys.stdin)
        sys.stdin.seek(0)
        assert main(["put", str(folder), "numbers", "-"]) == 0
        assert capsys.readouterr().out == "Put 2 tokens into numbers.\n"
        environment = {**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}
        command = [*COMMAND, "status", str(folder), "--follow", "--json"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout
            lines = iter(follower.stdout.readline, "")
            assert next(line for line in lines if '"square"' in line) and follower.poll() is None
            os.close(gate)
            rest = "".join(lines)
        assert '"state": "resting"' in rest and '"squares": 3' in rest
        assert main(["attach", str(folder)]) == 0
        assert "squares       3" in capsys.readouterr().out
        with Net.attach(folder) as attached:
            attached.put("things", {"any": "thing"})
            assert sorted(attached.marking()["squares"]) == [49, 64, 81]
            assert attached.marking()["things"] == [{"any": "thing"}]
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["put", "FOLDER", "numbers", "x"], "'x' is not of type int, and place numbers holds those."),
        (["put", "FOLDER", "none", "1"], "Net squares has no such place none."),
        (["put", "FOLDER", "meshes", "1"], "A Mesh for place meshes cannot be written as text."),
        (["run", "SCRIPT", "--folder", "FOLDER"], "There is a run in"),
        (["resume", "FOLDER"], "has a coordinator already."),
        (["status", "SCRIPT"], "There is no run in"),
        (["attach", "none"], "There is no run in none."),
        (["run", "none.py"], "There is no script none.py."),
        (["run", "SCRIPT", "--net", "other"], "makes no such net. Choose from squares."),
        (["run", "SCRIPT", "--memory", "much"], "'much' is not a size of memory."),
    ],
)
def test_an_error_is_one_sentence(
    script: Path,
    folder: Path,
    words: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(script.parent)
    with running(script, folder, "--stay"):
        given = [{"FOLDER": str(folder), "SCRIPT": str(script)}.get(word, word) for word in words]
        assert carme(["net", *given]) == 1
    message = capsys.readouterr().err
    assert message.startswith("carme net: ") and sentence in message
    assert not list(script.parent.glob("squares-*"))  # nothing is made in vain


def test_a_net_that_no_program_runs_is_reported(script: Path, folder: Path):
    with running(script, folder, "--stay"):
        attached = Net.attach(folder)
    with pytest.raises(PetriError, match="The program that ran the net has ended"):
        attached.status()
    attached.close()
    with pytest.raises(PetriError, match=r"No program runs the net of .* now\. Resume it: carme net resume"):
        Net.attach(folder)


def test_without_the_runtime_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "carme_runtime.petri.command", None)
    assert carme(["net", "status", "--json"]) == 1
    assert "Use carme net in a session or job" in capsys.readouterr().err
