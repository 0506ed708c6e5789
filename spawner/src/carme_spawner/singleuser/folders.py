"""The session's private folders on this node."""

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path


def private(name: str) -> Path:
    """A folder of the session that only its owner may enter; it is made if it is missing.

    Raises:
        PermissionError: Somebody else made it.
    """
    if job := os.environ.get("SLURM_JOB_ID"):
        top = Path(f"/tmp/carme-{job}")  # goes with the job
    else:
        top = Path(tempfile.gettempdir(), f"carme-{os.getpid()}")
        atexit.register(shutil.rmtree, top, ignore_errors=True)
    for folder in (top, top / name):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{folder} belongs to somebody else.")
        folder.chmod(0o700)
    return top / name
