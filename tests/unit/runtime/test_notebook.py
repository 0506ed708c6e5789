"""The magics of notebooks, in IPython itself and in real kernels."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import carme_runtime
from carme_runtime.notebook import _stage_destination
from patience import HANG

from .conftest import MEET, Process, Witness, clean_environment

pytest.importorskip("IPython")

SOURCES = Path(__file__).resolve().parents[3] / "carme/src"

NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("%load_ext carme_runtime.notebook")
for cell in sys.argv[1:]:
    done = shell.run_cell(cell)
    error = done.error_in_exec or done.error_before_exec
    print("CELL", type(error).__name__ if error else "ended", flush=True)
"""

Notebook = Callable[..., Process]


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    """Runs cells in a kernel's shell."""
    (tmp_path / "beside.py").write_text("HERE = 'found beside the notebook'\n")

    def run(*cells: str, **environment: str) -> Process:
        settings = clean_environment(IPYTHONDIR=str(tmp_path / "ipython"), **environment)
        return Process([sys.executable, "-c", NOTEBOOK, *cells], settings, tmp_path)

    return run


def left(folder: Path) -> list[str]:
    return [file.name for file in folder.glob(".cell-*")]


def test_a_cell_runs_on_all_ranks(notebook: Notebook, tmp_path: Path) -> None:
    cell = (
        "%%carme_run -n 2 -x KEY='a b' -- --epochs '3 4'\n"
        "import os, sys\nfrom beside import HERE\n"
        "print(os.environ['WORLD_SIZE'], os.environ['KEY'], sys.argv[1:], HERE, 'ü')\n"
    )
    code, out, errors = notebook("x = 1", cell, "print('after', x)").wait()
    assert code == 0, errors
    message = "2 a b ['--epochs', '3 4'] found beside the notebook ü"
    lines = out.splitlines()
    # It says at once that it starts, however long the ranks are silent.
    assert lines[:2] == ["CELL ended", "Starting 2 ranks on 1 node ..."]
    assert sorted(lines[2:4]) == [f"[rank 0] {message}", f"[rank 1] {message}"]
    assert lines[4:] == ["CELL ended", "after 1", "CELL ended"]
    assert left(tmp_path) == []


def test_a_rank_that_fails_makes_the_cell_fail(notebook: Notebook, tmp_path: Path) -> None:
    _, out, _ = notebook("%%carme_run -n 2\nraise ValueError('no data')\n", "print('goes on')").wait()
    assert "ValueError: no data" in out
    assert "RunFailed: the run ended with exit code 1; its output above says why." in out
    assert "CELL RunFailed" in out and "goes on" in out
    assert "notebook.py" not in out  # nothing of this module's own
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%carme_run -n 0\nprint(1)", "'0' is not a number of 1 or more."),
        ("%%carme_run --no-such-option\nprint(1)", "--no-such-option"),
        ("%%carme_run\n  \n", "The cell is empty."),
        ("%%carme_run -x 'A=1\nprint(1)", "No closing quotation"),
    ],
)
def test_what_cannot_start_says_why(notebook: Notebook, tmp_path: Path, cell: str, words: str) -> None:
    _, out, errors = notebook(cell).wait()
    assert words in out + errors
    assert "CELL ended" not in out
    assert left(tmp_path) == []


def test_magics_speak_the_sessions_language(notebook: Notebook) -> None:
    paths = f"{SOURCES}{os.pathsep}{Path(carme_runtime.__file__).parents[1]}"
    cells = ("%carme", "%carme_run", "%%carme_run -n 1\nraise SystemExit(3)\n")
    _, out, errors = notebook(*cells, CARME_LANGUAGE="de", PYTHONPATH=paths).wait()
    for sentence in (
        "Die Magics von Carme:",
        "Es ist kein Skript genannt. Schreiben Sie: %carme_run train.py",
        "RunFailed: der Lauf endete mit dem Code 3; den Grund nennt seine Ausgabe oben.",
    ):
        assert sentence in out + errors
    _, out, errors = notebook(*cells, CARME_LANGUAGE="fr", PYTHONPATH=paths).wait()
    assert "The magics of Carme:" in out and "No script is named." in out + errors


def test_an_interrupt_reaches_all_ranks(notebook: Notebook, witness: Witness, tmp_path: Path) -> None:
    run = notebook("%%carme_run -n 2\n" + MEET + "import time; time.sleep(600)", **witness.environment)
    witness.expect(2)
    run.popen.send_signal(signal.SIGINT)
    assert witness.all_gone()
    assert "CELL RunFailed" in run.wait()[1]
    assert left(tmp_path) == []


# The run's first moment lasts until the test lets it go on.
SLOW_START = """
import os, socket
from carme_runtime import notebook
real = notebook._end_with_the_notebook
def slowly():
    real()
    with socket.create_connection(("127.0.0.1", int(os.environ["WITNESS"]))) as test:
        assert test.recv(1)
notebook._end_with_the_notebook = slowly
"""


def test_an_interrupt_ends_a_run_that_is_being_started(
    notebook: Notebook, witness: Witness, tmp_path: Path
) -> None:
    again = "import signal; print(signal.getsignal(signal.SIGINT).__name__, signal.set_wakeup_fd(-1))"
    cell = "%%carme_run -n 2\n" + MEET + "witness.recv(1)"
    run = notebook(SLOW_START, cell, again, **witness.environment)
    witness.expect(1)
    run.popen.send_signal(signal.SIGINT)
    witness.release()
    out = run.wait()[1]
    assert "exit code 130" in out
    # What comes after has the interrupts as they were.
    assert out.splitlines()[-3:] == ["CELL RunFailed", "default_int_handler -1", "CELL ended"]
    assert left(tmp_path) == []


def test_a_kernel_that_is_killed_leaves_no_ranks(notebook: Notebook, witness: Witness) -> None:
    run = notebook("%%carme_run -n 2\n" + MEET + "witness.recv(1)", **witness.environment)
    witness.expect(2)
    run.popen.kill()
    assert witness.all_gone()


# --- the other magics, in a real kernel -------------------------------------------------------------------


class Kernel:
    """A kernel as JupyterLab starts it, with the magics loaded."""

    def __init__(self, folder: Path, **environment: str) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(transport="ipc", connection_file=str(folder / "kernel.json"))
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=command, language="python", display_name="Python")
        settings = clean_environment(IPYTHONDIR=str(folder / "ipython"), **environment)
        self._manager.start_kernel(cwd=str(folder), env=settings)
        self._client: Any = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=HANG)
        self.run("%load_ext carme_runtime.notebook")

    def run(self, code: str) -> tuple[str, list[dict[str, Any]], str]:
        """A cell's text, what it displays, updates too, and its error."""
        text: list[str] = []
        shown: list[dict[str, Any]] = []

        def collect(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                text.append(content["text"])
            elif "data" in content:
                shown.append(content["data"])

        reply = self._client.execute_interactive(code, output_hook=collect, timeout=HANG)["content"]
        return "".join(text), shown, reply.get("ename", "") + reply.get("evalue", "")

    def complaint(self, code: str) -> str:
        """What a cell that goes wrong says."""
        text, _, error = self.run(code)
        return text + error

    def complete(self, code: str) -> list[str]:
        """What Tab offers at the end of a cell, or where it has a bar."""
        before, _, after = code.partition("|")
        answer = self._client.complete(before + after, len(before), reply=True, timeout=HANG)
        return answer["content"]["matches"]

    def help(self, name: str) -> str:
        """What `NAME?` shows."""
        content = self._client.inspect(name, reply=True, timeout=HANG)["content"]
        return content["data"]["text/plain"] if content["found"] else ""

    def stop(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of job 123, with the command `carme`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(SOURCES)!r})\n"
    (programs / "carme").write_text(f"{program}from carme.cli import program\nprogram()\n")
    (programs / "carme").chmod(0o755)
    job = {"SLURM_JOB_ID": "123", "PATH": f"{programs}:{os.environ['PATH']}"}
    created = Kernel(tmp_path, **job)
    yield created
    created.stop()


def test_data_is_staged_with_progress_and_the_place_is_the_result(kernel: Kernel, tmp_path: Path) -> None:
    source = tmp_path / "from here"
    source.mkdir()
    for number in range(30):
        (source / f"{number}.bin").write_bytes(os.urandom(10_000))
    target = tmp_path / "to"
    line = f"%carme_stage --workers 1 --verify read '{source}' {target}"
    text, shown, error = kernel.run(f"data = {line}\nprint(repr(data))")
    assert (text, error) == (f"{target!r}\n", "")
    assert len(list(target.iterdir())) == 30
    last = shown[-1]["text/html"]
    assert '<progress aria-label="Node 1" value="1.000">' in last
    assert "30 files, 293.0 KiB" in last and "node 1: 30 files" in shown[-1]["text/plain"]
    # Again: nothing is copied twice.
    assert "0 B of it copied" in kernel.run(line)[1][-2]["text/plain"]
    text, shown, error = kernel.run(f"%carme_stage '{tmp_path / 'nothing'}' {target}")
    assert error.startswith("RunFailed") and "nothing" in text
    assert "invalid choice: 'twice'" in kernel.complaint("%carme_stage --verify twice a b")
    assert "unrecognized arguments: --fast" in kernel.complaint("%carme_stage --fast a b")
    assert "required: SOURCE" in kernel.complaint("%carme_stage")
    assert "has no name below /tmp" in kernel.complaint("%carme_stage /")


def test_staged_data_lies_below_the_jobs_folder_whatever_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    assert _stage_destination(None, Path("/data/set/images/..")) == Path("/tmp/set")


def test_a_report_is_what_jupyterlab_draws(kernel: Kernel) -> None:
    assert kernel.run("%carme_report")[1][0]["application/vnd.carme.report+json"] == {"job": 123}
    (shown,) = kernel.run("%carme_report 77")[1]
    assert shown["application/vnd.carme.report+json"] == {"job": 77}
    assert "carme report 77" in shown["text/plain"]
    assert "'x7' is not the number of a job." in kernel.complaint("%carme_report x7")
    none = "import os; del os.environ['SLURM_JOB_ID']\nget_ipython().run_line_magic('carme_report', '')"
    assert "outside of a job" in kernel.complaint(none)
    assert "say where to" in kernel.complaint("%carme_stage /etc/hostname")


def test_a_line_runs_a_script_and_lists_what_there_is(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:])\n")
    text, _, error = kernel.run("%carme_run -n 2 train.py --epochs 3")
    started, *lines = text.splitlines()
    assert started == "Starting 2 ranks on 1 node ..."
    assert sorted(lines) == [f"[rank {rank}] 2 ['--epochs', '3']" for rank in (0, 1)]
    assert error == ""
    assert "No script is named" in kernel.complaint("%carme_run")
    overview = kernel.run("%carme")[0]
    for magic in ("carme_run", "carme_stage", "carme_report", "carme_scale"):
        assert f"%{magic}" in overview
        assert f"%{magic}" in kernel.help(f"%{magic}")
    assert "%carme_run" in kernel.complete("%carme_r")


@pytest.mark.parametrize(
    ("cell", "some", "none"),
    [
        ("%%carme_run --dev", ["--devices-per-node", "--devices-per-rank"], "--nodes"),
        ("%carme_run --no", ["--nodes", "--no-gpu"], "-n"),
        ("%carme_stage --ver", ["--verify"], "--nodes"),
        ("%carme_stage --verify ", ["device", "none", "read"], "--nodes"),
        ("%carme_stage --verify d", ["device"], "read"),
        ("data = %carme_stage --ver", ["--verify"], "--nodes"),
        ("data = %carme_stage --verify ", ["device", "none", "read"], "--nodes"),
        ("advice = %carme_scale --", ["--network"], "--nodes"),
        ("%carme_scale --", ["--network", "--scale-seconds"], "--nodes"),
        ("%carme_scale --", ["--network"], "--scale-result"),
        ("%%carme_run --backend ", ["torch", "tensorflow"], "--nodes"),
        ("%%carme_run --torch-backend=g|\nimport torch\n", ["gloo"], "nccl"),
        ("%%carme_run --output=all --dev|\nprint(1)\n", ["--devices-per-node"], "--nodes"),
        ("%%carme_run -n 2 -- --no", [], "--nodes"),
    ],
)
def test_options_are_completed(shared_kernel: Kernel, cell: str, some: list[str], none: str) -> None:
    matches = shared_kernel.complete(cell)
    assert set(some) <= set(matches) and none not in matches


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that nobody changes."""
    created = Kernel(tmp_path_factory.mktemp("kernel"))
    yield created
    created.stop()


def test_paths_are_completed_as_everywhere(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "training_script.py").write_text("")
    assert kernel.complete("%carme_run -n 2 training_s") == ["training_script.py"]
    for source in ("training_s", "./training_s", str(tmp_path / "training_s")):
        found = kernel.complete(f"data = %carme_stage --nodes 2 {source}")
        assert found == [f"{source}cript.py"]
