"""Who may read a folder. It needs the standard library alone."""

import grp
import os
import pwd
import stat

__all__ = ["readers"]


def readers(path: str) -> str:
    """Who may read a folder, by its owner and mode: `everybody`, `group NAME`, or a user's name."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return "not there"
    if status.st_mode & stat.S_IROTH and status.st_mode & stat.S_IXOTH:
        return "everybody"
    try:
        if status.st_mode & stat.S_IRGRP:
            return f"group {grp.getgrgid(status.st_gid).gr_name}"
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return f"group {status.st_gid}" if status.st_mode & stat.S_IRGRP else str(status.st_uid)
