"""Magics of notebooks: run on all GPUs of the job, stage data to its nodes, see what it uses, how it scales.

`%load_ext carme_runtime.notebook` brings them; images of Carme have loaded it already. `%carme` lists them.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carme_runtime.wording import translate

__all__ = [
    "REPORT",
    "RunFailed",
    "carme",
    "carme_report",
    "carme_run",
    "carme_scale",
    "carme_stage",
    "load_ipython_extension",
]

#: What JupyterLab shows as a job's report, by its panel "Use": `{"job": 123}`.
REPORT = "application/vnd.carme.report+json"

#: As the command does. The folder of the notebook is none of its modules'.
_LAUNCHER = (
    "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
    "from carme_runtime.commands import run; sys.argv[0] = 'carme-run'; run({announces})"
)
_PR_SET_PDEATHSIG = 1
_STAGE_LINE = "%carme_stage SOURCE DESTINATION"


class RunFailed(Exception):
    """The run ended with an error, which its output names."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks for it: the lines of this module would help nobody.
        return [f"RunFailed: {self}"]


def carme(line: str = "") -> None:
    """List the magics of Carme, each with what it does."""
    rows = {
        "%carme_run [options] script.py [argument ...]": translate(
            "run a script once for each GPU of the job"
        ),
        "%%carme_run [options] [-- argument ...]": translate(
            "the same; the script is the cell below this line"
        ),
        "%carme_stage [options] SOURCE [DESTINATION]": translate(
            "copy data to the disk of each node, with progress"
        ),
        "%carme_report [JOBID]": translate("what this job uses of what you requested, and advice"),
        "%carme_scale [options] script.py [argument ...]": translate("predict how a script scales"),
    }
    lines = (f"    {usage:<47} {explanation}" for usage, explanation in rows.items())
    print(translate("The magics of Carme:"), *lines, sep="\n")
    print(
        translate(
            "Tab completes options, and a question mark explains a magic: {example}", example="%carme_run?"
        )
    )


def carme_run(line: str, cell: str | None = None) -> None:
    """Run a script or a cell once for each GPU of the job, on all of its nodes, as `carme-run` does.

    A cell is a program of its own: it sees no variables of the notebook and leaves none there. It may
    import what lies beside the notebook.

        %carme_run [options of carme-run] script.py [argument ...]
        %%carme_run [options of carme-run] [-- arguments of the program]

    `%carme_run --help` lists the options.

    Args:
        line: What follows the name of the magic.
        cell: The program; None: the line names a script.

    Raises:
        RunFailed: A rank failed, or the run could not start.
        UsageError: The line has an open quote or names no script, or the cell is empty.
        OSError: The working folder, which all nodes must see, cannot be written to.
    """
    from IPython.core.error import UsageError

    words = _words(line)
    if cell is None:
        if not words:
            raise UsageError(translate("No script is named. Write: {line}", line="%carme_run train.py"))
        return _run(words, announces=True)
    place = words.index("--") if "--" in words else len(words)
    options, arguments = words[:place], words[place + 1 :]
    if not cell.strip():
        raise UsageError(translate("The cell is empty. Write the program below the line with %%carme_run."))
    script = Path.cwd() / f".cell-{secrets.token_hex(4)}.py"
    opened = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(opened, "w", encoding="utf-8") as file:
        file.write(cell)
    try:
        _run([*options, "--", str(script), *arguments], announces=True)
    finally:
        with contextlib.suppress(FileNotFoundError):
            script.unlink()


def carme_stage(line: str) -> Path:
    """Copy a folder or file to the own disk of each node of the job, every byte verified, with its progress.

        data = %carme_stage [options] SOURCE [DESTINATION]

        SOURCE               a folder or file that all nodes see
        DESTINATION          default: /tmp/NAME, which belongs to the job alone and ends with it
        --nodes M            the first M nodes only
        --bandwidth SIZE     at most so much a second on each node, such as 500M
        --workers N          processes of each node (default: by its processors)
        --verify HOW         read (default), device or none
        --contents           find changes by contents, not by size and time

    Run it again to go on after an interrupt, or to copy only what has changed. What the start form's *Data*
    names is there before your time starts: use this for what you did not know then.

    Returns:
        The destination, the same path on each node.

    Raises:
        RunFailed: Something could not be copied; the lines above say what.
        UsageError: The line cannot be read, or names no destination outside of a job.
    """
    import shutil

    from carme_runtime.staging_progress import StagingProgress

    options = _stage_parser().parse_args(_words(line))
    source = Path(options.source).expanduser().absolute()
    destination = _stage_destination(options.destination, source)
    if shutil.which("carme") is None:
        raise RunFailed(
            translate(
                "the command carme is missing here. Install it with: {command}",
                command="pip install 'carme[staging]'",
            )
        )
    words = ["--devices-per-node", "1", "--no-gpu"]
    words += ["--nodes", options.nodes] if options.nodes else []
    words += ["--", "carme", "data", "copy", "--json"]
    for name in ("bandwidth", "workers", "verify"):
        if value := getattr(options, name):
            words.append(f"--{name}={value}")
    words += ["--contents"] if options.contents else []
    with StagingProgress() as progress:
        _run([*words, "--", str(source), str(destination)], progress.feed)
    return destination


def carme_report(line: str = "") -> None:
    """Show what a job uses of what you requested, what its ranks wait for, and what to change.

        %carme_report           this session's
        %carme_report JOBID     another job of yours

    JupyterLab draws it, and brings it up to date while the job runs.

    Raises:
        UsageError: There is no such number of a job, or none is named outside of a job.
    """
    from IPython.core.error import UsageError
    from IPython.display import display

    job = line.strip() or os.environ.get("SLURM_JOB_ID", "")
    if not job:
        sentence = translate(
            "This notebook runs outside of a job. Name one of yours: {line}", line="%carme_report JOBID"
        )
        raise UsageError(sentence)
    if not (job.isascii() and job.isdecimal()):
        sentence = translate(
            "{job!r} is not the number of a job. Write: {line}", job=job, line="%carme_report JOBID"
        )
        raise UsageError(sentence)
    text = translate(
        "JupyterLab shows here what job {job} uses. In a terminal of the login host: {command}",
        job=job,
        command=f"carme report {job}",
    )
    display({REPORT: {"job": int(job)}, "text/plain": text}, raw=True)


def carme_scale(line: str) -> Any:
    """Measure a script on one rank and draw how it scales; see `carme_runtime.scaling`.

        %carme_scale [--network "100 Gbit/s, 2 us"] [--scale-seconds 60] train.py [argument ...]

    Raises:
        RunFailed: The script could not be measured.
        UsageError: The line has an open quote, or names no script.
    """
    from IPython.core.error import UsageError

    from carme_runtime.scaling import load
    from carme_runtime.scaling.shown import Advice

    words = _words(line)
    if not words:
        raise UsageError(translate("No script is named. Write: {line}", line="%carme_scale train.py"))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "scale.json"
        options = ["-n", "1", "--scale-probe", "--scale-result", str(result)]
        code = _follow(_command([*options, *words]))
        if code:
            raise RunFailed(
                translate("the probe ended with exit code {code}; its output above says why.", code=code)
            )
        return Advice.of(load(result))


def load_ipython_extension(shell: Any) -> None:
    """Make the magics known to a notebook, and let memory that runs out end it before its server.

    IPython calls this.
    """
    from carme_runtime import oom_score
    from carme_runtime.notebook_completion import install

    shell.register_magic_function(carme, "line", "carme")
    shell.register_magic_function(carme_run, "line_cell", "carme_run")
    for magic in (carme_stage, carme_report, carme_scale):
        shell.register_magic_function(magic, "line", magic.__name__)
    install(shell, _stage_parser)
    oom_score.raise_own(oom_score.KERNEL)


def _words(line: str) -> list[str]:
    """The line as a shell would split it. Raises UsageError."""
    from IPython.core.error import UsageError

    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(translate("The line cannot be read: {error}.", error=error)) from None


def _stage_parser() -> Any:
    """What understands the line of `%carme_stage`; wrong ones raise UsageError."""
    from IPython.core.magic_arguments import MagicArgumentParser

    parser = MagicArgumentParser(prog="%carme_stage")
    parser.allow_abbrev = False  # an option of later versions shall not change what is typed today
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION", nargs="?")
    for name in ("--nodes", "--bandwidth", "--workers"):
        parser.add_argument(name)
    parser.add_argument("--verify", choices=("read", "device", "none"))
    parser.add_argument("--contents", action="store_true")
    return parser


def _stage_destination(destination: str | None, source: Path) -> Path:
    from IPython.core.error import UsageError

    if destination:
        return Path(destination).expanduser().absolute()
    if not os.environ.get("SLURM_JOB_ID"):
        raise UsageError(translate("Outside of a job say where to: {line}", line=_STAGE_LINE))
    name = Path(os.path.normpath(source)).name  # without "..", which would leave /tmp
    if not name:
        sentence = translate(
            "{source} has no name below /tmp. Say where to: {line}", source=source, line=_STAGE_LINE
        )
        raise UsageError(sentence)
    return Path("/tmp") / name


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _command(words: list[str], announces: bool = False) -> list[str]:
    """`carme-run` with these words."""
    return [sys.executable, "-c", _LAUNCHER.format(announces=announces), *words]


def _run(words: list[str], show: Callable[[str], None] = _print, announces: bool = False) -> None:
    """Run it; `announces`: it says what it starts. Raises RunFailed."""
    if code := _follow(_command(words, announces), show):
        raise RunFailed(
            translate("the run ended with exit code {code}; its output above says why.", code=code)
        )


def _follow(command: list[str], show: Callable[[str], None] = _print) -> int:
    """Run a program and show what it writes, until it ends; its exit code, 128 + number for a signal.

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
            code = _show(process, interrupts, show)
        except BaseException:
            process.terminate()  # nobody follows it any more
            raise
    return code if code >= 0 else 128 - code


def _show(process: subprocess.Popen[bytes], interrupts: "_Interrupts", show: Callable[[str], None]) -> int:
    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        if interrupts.wakeup is not None:
            waiting.register(interrupts.wakeup, selectors.EVENT_READ)
        while process.stdout in waiting.get_map():
            ready = [key.fileobj for key, _ in waiting.select()]
            if interrupts.interrupted():
                process.send_signal(signal.SIGINT)
            if process.stdout in ready:
                data = os.read(process.stdout.fileno(), 65536)
                show(decoder.decode(data, not data))
                if not data:
                    waiting.unregister(process.stdout)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1)
        if interrupts.interrupted():
            process.send_signal(signal.SIGINT)


class _Interrupts:
    """While it is entered, interrupts raise nothing, but are kept, for `came` to report.

    An exception would come wherever this process just is, so also where nothing catches it: while the run is
    being started, or between the wait and what follows it. And one that comes just before a wait begins would
    not end it: the kernel's word in a pipe does (signal.set_wakeup_fd). Only the main thread gets interrupts;
    in others, and where they are ignored, there is nothing to keep.
    """

    def __init__(self) -> None:
        self.wakeup: int | None = None
        self._write = self._earlier = -1
        self._before: Any = None

    def __enter__(self) -> "_Interrupts":
        self._before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(self._before):
            return self
        self.wakeup, self._write = os.pipe()
        for end in (self.wakeup, self._write):
            os.set_blocking(end, False)
        self._earlier = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        return self

    def interrupted(self) -> bool:
        """Whether an interrupt has come since the last call."""
        numbers = b""
        while self.wakeup is not None:
            try:
                numbers += os.read(self.wakeup, 4096)
            except BlockingIOError:
                break
        other_numbers = numbers.replace(bytes([signal.SIGINT]), b"")
        if other_numbers and self._earlier >= 0:
            # Not for us: for the loop of events that is at home here.
            with contextlib.suppress(OSError):
                os.write(self._earlier, other_numbers)
        return signal.SIGINT in numbers

    def __exit__(self, kind: object, *_: object) -> None:
        if self.wakeup is None:
            return
        signal.signal(signal.SIGINT, self._before)
        signal.set_wakeup_fd(self._earlier)
        missed = self.interrupted()
        os.close(self.wakeup)
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
