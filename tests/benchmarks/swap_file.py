"""A swap file for as long as a benchmark needs one: switched off again also when a signal ends the program.

What SIGKILL leaves (the kernel still swaps to the file) is found and removed by the next run, or by hand:
`swapoff FILE`, with the name in /proc/swaps, before the file is deleted.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

_NAME = "carme-bench-swap-"  # of whose processes, and the number of the process follow
_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
SWAPS = Path("/proc/swaps")


@contextlib.contextmanager
def swap_file(folder: Path, size: int) -> Iterator[Path]:
    """Let the kernel swap to a new file.

    Signals that end the program wait while it is switched on or off; SIGTERM must be made an exception, as
    `report.tidy_up_when_ended` does.

    Args:
        folder: On a disk.
        size: Bytes.

    Raises:
        OSError: There is no room.
        subprocess.CalledProcessError: The kernel allows none, or could not take back what lay in it.
    """
    file = folder / f"{_own()}{os.getpid()}"
    try:
        with file.open("wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, size)
        file.chmod(0o600)
        _run("mkswap", file)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            _run("swapon", file)
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                yield file
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
                _run("swapoff", file)
        finally:
            if file not in _files_in_use():
                file.unlink(missing_ok=True)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if file not in _files_in_use():  # a file without a name cannot be switched off
            file.unlink(missing_ok=True)


def remove_left_swap_files() -> list[Path]:
    """Switch off what killed runs have left. Returns the files.

    The kernel's table has the files of the whole machine. Those of containers, whose processes are not seen
    here, and those that are not in this file system stay.

    Raises:
        subprocess.CalledProcessError: It cannot be switched off.
    """
    own = _own()
    left = [
        file
        for file in _files_in_use()
        if file.name.startswith(own) and not _runs(file.name.removeprefix(own)) and file.exists()
    ]
    for file in left:
        _run("swapoff", file)
        file.unlink(missing_ok=True)
    return left


def _own() -> str:
    """How names begin whose numbers are those of processes that are seen here."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{_NAME}{boot}-{Path('/proc/self/ns/pid').stat().st_ino}-"


def _runs(number: str) -> bool:
    return Path("/proc", number).exists()


def _files_in_use() -> list[Path]:
    lines = SWAPS.read_text().splitlines()[1:]
    return [Path(line.split()[0].replace("\\040", " ")) for line in lines]


def _run(command: str, file: Path) -> None:
    # In a session of its own: Ctrl-C ends all of this one's, and swapoff would give up.
    subprocess.run([command, file], check=True, capture_output=True, text=True, start_new_session=True)
