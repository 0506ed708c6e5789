"""A node of Ray: `python -m carme_runtime.launcher.ray_node OPTIONS`, those of `ray start`.

Ray keeps its sockets and logs in a folder that other users must not see, and leaves it behind. Here it is
this user's alone, and ends with the node.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from carme_runtime.launcher.ray import FOLDER

_ENDING, _REMOVING = 1.5, 2.0  # seconds at most


def main() -> int:
    """Start it, and wait for its end; the exit code is Ray's, or 0 after SIGTERM."""
    folder = Path(os.environ[FOLDER])
    own = _make(folder)
    if own is None:
        print(f"The folder {folder} belongs to somebody else.", file=sys.stderr)
        return 1
    # Ray opens its folder to everybody, so it lies in one that is closed.
    head = ["--temp-dir", str(folder / "t")] if "--head" in sys.argv else []
    start = [sys.executable, "-m", "carme_runtime.launcher.ray_start", "start", "--block"]
    command = [*start, *sys.argv[1:], *head]
    stopping = False
    process = subprocess.Popen(command)

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        process.terminate()
        # The agent kills this process 5 s after SIGTERM: before, the folder must be gone.
        threading.Timer(_ENDING, process.kill).start()

    signal.signal(signal.SIGTERM, stop)
    try:
        code = process.wait()
    finally:
        if own:
            _remove(folder)
    return 0 if stopping else (code if code >= 0 else 128 - code)


def _remove(folder: Path) -> None:
    """Remove what Ray's last processes may still write to."""
    end = time.monotonic() + _REMOVING
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def _make(folder: Path) -> bool | None:
    """Whether this process has made the folder; None: it is not this user's."""
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        found = folder.lstat()
        is_ours = found.st_uid == os.getuid() and found.st_mode & 0o77 == 0 and not folder.is_symlink()
        return False if is_ours else None
    return True


if __name__ == "__main__":
    sys.exit(main())
