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

_PREFIX, _LOCK, _NEW_LOCK = ".compare-", "lock", "lock.new"
_REMOVING = 1.0  # seconds at most: a cancelled job has few
_MAKING = 3600.0  # seconds after which a folder without a lock will get none


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, which ends with the comparison; what killed ones have left there goes first.

    A comparison holds a lock of the kernel in its folder, so no other takes it for a killed one's. On many
    network file systems only processes of one node see each other's locks. So the lock's file names the node,
    and others leave the folder alone.
    """
    _remove_left(folder)
    path = Path(tempfile.mkdtemp(dir=folder, prefix=_PREFIX))
    lock = None
    try:
        with contextlib.suppress(OSError):  # where nothing can be locked, the folder is never taken for left
            lock = (path / _NEW_LOCK).open("w+b")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.write(_this_node())
            lock.flush()
            (path / _NEW_LOCK).rename(path / _LOCK)
        yield path
    finally:
        if lock:
            lock.close()
        _remove(path)


def _this_node() -> bytes:
    """Distinguishes nodes, and their starts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot}\n".encode()


def _remove_left(folder: Path) -> None:
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # also where a comparison holds the lock
            if left.is_symlink() or left.lstat().st_uid != os.getuid():
                continue
            if not (left / _LOCK).exists():
                _remove_empty(left)
                continue
            with (left / _LOCK).open("r+b") as lock:
                if lock.read() != _this_node():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left)


def _remove_empty(left: Path) -> None:
    """Remove what a comparison has left that was killed before it had a lock, or after its lock was gone."""
    if time.time() - left.stat().st_mtime > _MAKING and _names(left) <= {_NEW_LOCK}:
        (left / _NEW_LOCK).unlink(missing_ok=True)
        left.rmdir()


def _remove(path: Path) -> None:
    """Remove a folder, the lock last: what is not done here the next comparison does.

    A network file system keeps files that a process still has open, so it may take several tries.
    """
    end = time.monotonic() + _REMOVING
    while True:
        with contextlib.suppress(OSError):
            for name in _names(path) - {_LOCK}:
                with contextlib.suppress(OSError):
                    _remove_one(path / name)
            if _names(path) <= {_LOCK}:
                (path / _LOCK).unlink(missing_ok=True)
                path.rmdir()
        if not path.exists() or time.monotonic() >= end:
            return
        time.sleep(0.05)


def _remove_one(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
