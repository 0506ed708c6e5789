"""Where a run of Dask shows its pages: a Unix socket with a name of its own below the session's folder."""

import fcntl
import importlib.util
import os
import socket
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MOST_AT_ONCE = 20


@dataclass(frozen=True)
class Pages:
    """The socket of a run's pages, whose name no other run takes as long as there is this."""

    path: Path


def pages_of(caller: Mapping[str, str], host: str) -> Pages | None:
    """Where a session shows this run's pages, to its user alone; None outside of sessions.

    None as well where the scheduler is on another node than the session.

    Args:
        caller: The environment of the process that starts the run.
        host: Of the scheduler.
    """
    folder = Path(f"/tmp/carme-{caller.get('SLURM_JOB_ID')}/apps")
    if not _is_private(folder) or not importlib.util.find_spec("bokeh"):
        return None
    own_hosts = {caller.get("SLURMD_NODENAME"), socket.gethostname()}
    if host not in own_hosts:
        return None
    for name in ("dask", *(f"dask-{number}" for number in range(2, _MOST_AT_ONCE))):
        found = _reserved(folder, name)
        if found:
            return found
    return None


def _reserved(folder: Path, name: str) -> Pages | None:
    """A name for this run alone; None where another one has it."""
    path = folder / f"{name}.sock"
    try:
        lock = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = not _listens(path)
    except OSError:
        free = False
    if not free:
        os.close(lock)
        return None
    found = Pages(path)
    weakref.finalize(found, os.close, lock)
    return found


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o77


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True
