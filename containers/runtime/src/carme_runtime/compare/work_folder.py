"""The folder of a comparison while it runs, beside its report."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX, _LOCK = ".compare-", "lock"
_REMOVING = 1.0  # seconds at most: a cancelled job has few


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, which ends with the comparison; what killed ones have left there goes first.

    A comparison holds a lock of the kernel in its folder, so no other takes it for a killed one's.
    """
    _remove_left(folder)
    made = Path(tempfile.mkdtemp(dir=folder, prefix=_PREFIX))
    lock = None
    try:
        with contextlib.suppress(OSError):  # where nothing can be locked, the folder is never taken for left
            lock = (made / f"{_LOCK}.new").open("w+b")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (made / f"{_LOCK}.new").rename(made / _LOCK)
        yield made
    finally:
        if lock:
            lock.close()
        _remove(made)


def _remove_left(folder: Path) -> None:
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # also where a comparison holds the lock
            if left.lstat().st_uid == os.getuid():
                with (left / _LOCK).open("r+b") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                _remove(left)  # a network file system kept the lock while it was open


def _remove(made: Path) -> None:
    """A network file system keeps files that a process still has open, so it may take several tries."""
    end = time.monotonic() + _REMOVING
    shutil.rmtree(made, ignore_errors=True)
    while made.exists() and time.monotonic() < end:
        time.sleep(0.05)
        shutil.rmtree(made, ignore_errors=True)
