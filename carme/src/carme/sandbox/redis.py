"""A Redis server of our own: for a sandbox, and for tests."""

import os
import shutil
from pathlib import Path

__all__ = ["redis_command"]

#: Where `./test` unpacks the server's Debian packages, which it does not install.
_UNPACKED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carme/redis-server/usr"


def redis_command(socket: Path) -> list[str] | None:
    """The command that runs Redis on a Unix socket, without a port and without files.

    Args:
        socket: Where it listens; Redis works in the socket's folder.

    Returns:
        None where there is no Redis.
    """
    options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(socket.parent)]
    options += ["--save", "", "--loglevel", "warning"]
    if installed := shutil.which("redis-server"):
        return [installed, *options]
    unpacked = _UNPACKED / "bin/redis-server"
    if not unpacked.exists():
        return None
    libraries = os.pathsep.join(map(str, _UNPACKED.glob("lib/*-linux-gnu")))
    return ["env", f"LD_LIBRARY_PATH={libraries}", str(unpacked), *options]
