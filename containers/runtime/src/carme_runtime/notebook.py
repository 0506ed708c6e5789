"""`%%carme_run` in notebooks: a cell that runs on all GPUs of the job.

`%load_ext carme_runtime.notebook` brings it; images of Carme have loaded it already.
"""

import codecs
import contextlib
import ctypes
import os
import secrets
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["RunFailed", "carme_run", "load_ipython_extension"]

#: As the command does. The folder of the notebook is none of its modules'.
_LAUNCHER = (
    "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
    "from carme_runtime.commands import run; sys.argv[0] = 'carme-run'; run()"
)
_PR_SET_PDEATHSIG = 1


class RunFailed(Exception):
    """The run ended with an error, which its output names."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks for it: the lines of this module would tell nobody anything.
        return [f"RunFailed: {self}"]


def carme_run(line: str, cell: str) -> None:
    """Run a cell once for each GPU of the job, on all of its nodes, as `carme-run` does a script.

    The cell is a program of its own: it sees no variables of the notebook and leaves none there. It may
    import what lies beside the notebook.

        %%carme_run [options of carme-run] [-- arguments of the program]

    Args:
        line: What follows the name of the magic.
        cell: The program.

    Raises:
        RunFailed: A rank failed, or the run could not start.
        UsageError: The line has an open quote, or the cell is empty.
        OSError: The working folder, which all nodes must see, cannot be written to.
    """
    from IPython.core.error import UsageError

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"The line cannot be read: {error}.") from None
    place = words.index("--") if "--" in words else len(words)
    options, arguments = words[:place], words[place + 1 :]
    if not cell.strip():
        raise UsageError("The cell is empty. Write the program below the line with %%carme_run.")
    script = Path.cwd() / f".cell-{secrets.token_hex(4)}.py"
    opened = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(opened, "w", encoding="utf-8") as file:
        file.write(cell)
    try:
        code = _follow([sys.executable, "-c", _LAUNCHER, *options, "--", str(script), *arguments])
    finally:
        with contextlib.suppress(FileNotFoundError):
            script.unlink()
    if code:
        raise RunFailed(f"the run ended with exit code {code}; its output above says why.")


def load_ipython_extension(shell: Any) -> None:
    """Make `%%carme_run` known to a notebook; IPython calls this."""
    shell.register_magic_function(carme_run, "cell", "carme_run")


def _follow(command: list[str]) -> int:
    """Run a program and print what it writes, until it ends; its exit code."""
    # A process group of its own: an interrupt reaches the notebook, and from there the run, once.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_the_notebook,
    ) as process:
        assert process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                data = os.read(process.stdout.fileno(), 65536)
                print(decoder.decode(data, not data), end="", flush=True)
                if not data:
                    return process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)


def _end_with_the_notebook() -> None:
    """A kernel that is killed takes its run along (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
