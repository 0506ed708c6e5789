"""`%%carme_run`, in IPython itself."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import MEET, Process, Witness, clean_environment

pytest.importorskip("IPython")

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
    return [one.name for one in folder.glob(".cell-*")]


def test_a_cell_runs_on_all_ranks(notebook: Notebook, tmp_path: Path) -> None:
    cell = (
        "%%carme_run -n 2 -x KEY='a b' -- --epochs '3 4'\n"
        "import os, sys\nfrom beside import HERE\n"
        "print(os.environ['WORLD_SIZE'], os.environ['KEY'], sys.argv[1:], HERE, 'ü')\n"
    )
    code, out, errors = notebook("x = 1", cell, "print('after', x)").wait()
    assert code == 0, errors
    message = "2 a b ['--epochs', '3 4'] found beside the notebook ü"
    assert sorted(out.splitlines()) == sorted(
        ["CELL ended", f"[rank 0] {message}", f"[rank 1] {message}", "CELL ended", "after 1", "CELL ended"]
    )
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
        ("%%carme_run -n 0\nprint(1)", "'0' is no number of 1 or more."),
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


def test_an_interrupt_while_the_run_is_being_started(
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
