"""In notebooks: `%%carme_run`, a cell that runs on all GPUs of the job; `%carme_scale`, how a script scales.

`%load_ext carme_runtime.notebook` brings it; images of Carme have loaded it already.
"""

import codecs
import contextlib
import ctypes
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

__all__ = ["RunFailed", "carme_run", "carme_scale", "load_ipython_extension"]

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


def carme_scale(line: str) -> Any:
    """Measure a script on one rank and draw how it scales; see `carme_runtime.scaling`.

        %carme_scale [--network "100 Gbit/s, 2 us"] train.py [argument ...]

    Raises:
        RunFailed: The script could not be measured.
        UsageError: The line has an open quote, or names no script.
    """
    from IPython.core.error import UsageError

    from carme_runtime.scaling import load
    from carme_runtime.scaling.shown import Advice

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"The line cannot be read: {error}.") from None
    if not words:
        raise UsageError("No script is named. Write: %carme_scale train.py")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "scale.json"
        options = ["-n", "1", "--scale-probe", "--scale-result", str(result)]
        code = _follow([sys.executable, "-c", _LAUNCHER, *options, *words])
        if code:
            raise RunFailed(f"the probe ended with exit code {code}; its output above says why.")
        return Advice.of(load(result))


def load_ipython_extension(shell: Any) -> None:
    """Make `%%carme_run` and `%carme_scale` known to a notebook; IPython calls this."""
    shell.register_magic_function(carme_run, "cell", "carme_run")
    shell.register_magic_function(carme_scale, "line", "carme_scale")


def _follow(command: list[str]) -> int:
    """Run a program and print what it writes, until it ends; its exit code, 128 + number for a signal.

    An interrupt is passed on to the program, and none is lost, whenever it comes.

    Raises:
        KeyboardInterrupt: An interrupt came just when the program had ended.
    """
    with (
        _Interrupts() as interrupts,
        # A process group of its own: an interrupt reaches the notebook, and from there the run, once.
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare_the_run,
        ) as process,
    ):
        try:
            code = _show(process, interrupts)
        except BaseException:
            process.terminate()  # nobody follows it any more
            raise
    return code if code >= 0 else 128 - code


def _show(process: subprocess.Popen[bytes], interrupts: "_Interrupts") -> int:
    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        if interrupts.news is not None:
            waiting.register(interrupts.news, selectors.EVENT_READ)
        while process.stdout in waiting.get_map():
            ready = [key.fileobj for key, _ in waiting.select()]
            if interrupts.came():
                process.send_signal(signal.SIGINT)
            if process.stdout in ready:
                data = os.read(process.stdout.fileno(), 65536)
                print(decoder.decode(data, not data), end="", flush=True)
                if not data:
                    waiting.unregister(process.stdout)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1)
        if interrupts.came():
            process.send_signal(signal.SIGINT)


class _Interrupts:
    """While it is entered, interrupts raise nothing, but are kept, for `came` to tell of.

    An exception would come wherever this process just is, so also where nothing catches it: while the run is
    being started, or between the wait and what follows it. And one that comes just before a wait begins would
    not end it: the kernel's word in a pipe does (signal.set_wakeup_fd). Only the main thread gets interrupts;
    in others, and where they are ignored, there is nothing to keep.
    """

    def __init__(self) -> None:
        self.news: int | None = None
        self._write = self._other = -1
        self._before: Any = None

    def __enter__(self) -> "_Interrupts":
        self._before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(self._before):
            return self
        self.news, self._write = os.pipe()
        for end in (self.news, self._write):
            os.set_blocking(end, False)
        self._other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        return self

    def came(self) -> bool:
        """Whether an interrupt has come since the last call."""
        numbers = b""
        while self.news is not None:
            try:
                numbers += os.read(self.news, 4096)
            except BlockingIOError:
                break
        others = numbers.replace(bytes([signal.SIGINT]), b"")
        if others and self._other >= 0:
            # Not for us: for the loop of events that is at home here.
            with contextlib.suppress(OSError):
                os.write(self._other, others)
        return signal.SIGINT in numbers

    def __exit__(self, kind: object, *_: object) -> None:
        if self.news is None:
            return
        signal.signal(signal.SIGINT, self._before)
        signal.set_wakeup_fd(self._other)
        missed = self.came()
        os.close(self.news)
        os.close(self._write)
        if missed and kind is None:
            raise KeyboardInterrupt


def _prepare_the_run() -> None:
    # Until it is ready for an interrupt, which would be lost among its imports.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _end_with_the_notebook()


def _end_with_the_notebook() -> None:
    """A kernel that is killed takes its run along (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
