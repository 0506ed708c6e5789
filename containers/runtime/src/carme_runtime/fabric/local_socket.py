"""The Unix socket by which clients on a node reach its agent: where it is, and who may use it."""

import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError


def default_path(environment: Mapping[str, str]) -> Path | None:
    """Where the agent of the Slurm job that `environment` names has its socket; None outside jobs."""
    job = environment.get("SLURM_JOB_ID", "")
    return Path(f"/tmp/carme-{job}/agent.sock") if job.isdecimal() else None


def make_private_directory(path: Path) -> None:
    """Make `path` for this user alone where it is missing, and refuse one that others could have laid out.

    /tmp is open to everybody: anyone who owns the folder could put another socket in its place.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        raise CarmeRuntimeError(
            f"The folder {path} must belong to this user, and others must not be able to write into it.",
            "Ask its owner to remove it, or name another place with --socket and --announce.",
        )


def listen(path: Path | None) -> socket.socket:
    """A listening socket at `path` (None: in a new private folder) that its owner alone can open."""
    if path is None:
        import tempfile  # not for jobs, and an agent's start is to be short

        path = Path(tempfile.mkdtemp(prefix="carme-")) / "agent.sock"
    make_private_directory(path.parent)
    if _answers(path):
        raise CarmeRuntimeError(
            f"Another agent listens at {path} already.", "Use that one, or name another place with --socket."
        )
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        server.bind(str(path))
        server.listen()
    except OSError as error:
        server.close()
        raise CarmeRuntimeError(
            f"The agent cannot listen at {path}: {error.strerror or error}.",
            "Name a shorter or another path with --socket.",
        ) from None
    finally:
        os.umask(mask)
    return server


def is_own_peer(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this process's user, by the kernel's word."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid == os.getuid()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
