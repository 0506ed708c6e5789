"""`carme-run --trace`: what is checked before a run, and what is made of the recordings after it."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carme_runtime import profile
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.traces.errors import TraceError

OPTIONS_WITH_VALUE = ("--trace", "--trace-limit")
_USUAL_LIMIT = "1G"
_LEAST = 1 << 16  # bytes of a rank


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `carme-run`."""
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="FORMAT:PATH",
        help="record what all ranks do and when: otf2:DIR for Vampir and other readers of OTF2, html:FILE "
        "for a page in the browser; may be given twice",
    )
    parser.add_argument(
        "--trace-limit",
        metavar="SIZE",
        help="the most that all recordings take together; further events are only counted "
        f"(default: {_USUAL_LIMIT})",
    )


@dataclass
class Tracing:
    """Of one run.

    Args:
        folder: Where the ranks leave their recordings; on all nodes.
        targets: What is to be made of them, such as `otf2:DIR`.
        ranks: How many there are.
        limit: Bytes of each recording.
    """

    folder: Path
    targets: Sequence[str]
    ranks: int
    limit: int

    def variables(self) -> dict[str, str]:
        """What the ranks find in their environment."""
        return {profile.TRACE: str(self.folder), profile.LIMIT: str(self.limit)}

    def finish(self) -> None:
        """Make what was requested, and say so. Where that fails, the recordings stay."""
        command = ["-m", "carme_runtime.traces.convert", str(self.folder), str(self.ranks), *self.targets]
        done = subprocess.run([sys.executable, *command], check=False)
        if done.returncode == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        print(
            f"carme-run: The recordings are in {self.folder}. To try again: python {' '.join(command)}",
            file=sys.stderr,
            flush=True,
        )


def prepare(options: argparse.Namespace, ranks: int) -> Tracing | None:
    """Check what is requested before anything runs; None: nothing is.

    Raises:
        CarmeRuntimeError: A trace of that format, at that place or of that size cannot be made.
    """
    if not options.trace:
        if options.trace_limit:
            raise TraceError("--trace-limit belongs to --trace.", "Add it, such as --trace otf2:trace.")
        return None
    limit = parse_size(options.trace_limit or _USUAL_LIMIT) // ranks
    if limit < _LEAST:
        raise TraceError(
            f"--trace-limit {options.trace_limit} leaves {limit} bytes for each of {ranks} ranks.",
            f"Give at least {ranks * _LEAST >> 10}K.",
        )
    from carme_runtime.traces.convert import parse  # what most runs do without

    targets = [parse(text) for text in options.trace]
    for kind, path in targets:
        _check(kind, path)
    first = targets[0][1].absolute()
    try:
        folder = Path(tempfile.mkdtemp(prefix=".carme-trace-", dir=first.parent))
    except OSError as error:
        raise _refused(first, error) from None
    return Tracing(folder, [f"{kind}:{path.absolute()}" for kind, path in targets], ranks, limit)


def _check(kind: str, path: Path) -> None:
    if kind == "otf2":
        from carme_runtime.traces import libotf2

        libotf2.find()
        if path.exists():
            raise TraceError(f"{path} exists, and an archive is a new folder.", "Name another, or remove it.")
    elif path.is_dir():
        raise TraceError(f"{path} is a folder, and a page is a file.", f"Write html:{path / 'trace.html'}.")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise _refused(path, error) from None


def _refused(path: Path, error: OSError) -> TraceError:
    return TraceError(
        f"The trace cannot be written to {path}: {error.strerror}.", "Name a folder in which you may write."
    )
