"""Trees for the tests of copying, and what a plain walk says of them."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import HANG

#: With the compiled part, and without it.
both_engines = pytest.mark.usefixtures("engine")
SOURCE = Path(__file__).resolve().parents[4] / "carme" / "src"


def walk(top: Path | str, *, times: bool = True) -> dict[bytes, Any]:
    """All that is to be kept of a tree, by path; its top is `b"."`."""
    found: dict[bytes, Any] = {}
    names: dict[tuple[int, int], bytes] = {}
    stack = [b"."]
    root = os.fsencode(top)
    while stack:
        path = stack.pop()
        full = os.path.join(root, path)
        status = os.lstat(full)
        kind = stat.S_IFMT(status.st_mode)
        entry: list[Any] = [status.st_mode, status.st_uid, status.st_gid]
        if times:
            entry.append(status.st_mtime_ns)
        if kind == stat.S_IFLNK:
            entry.append(os.readlink(full))
        elif kind == stat.S_IFREG:
            with open(full, "rb") as file:
                entry += [status.st_size, hashlib.file_digest(file, "sha256").hexdigest()]
            # Which names are one file, by the first of them.
            entry.append(names.setdefault((status.st_dev, status.st_ino), path))
        elif kind == stat.S_IFDIR:
            stack += sorted((os.path.join(path, name) for name in os.listdir(full)), reverse=True)
        else:
            entry.append(status.st_rdev)
        if kind != stat.S_IFLNK:
            attributes = {name: os.getxattr(full, name) for name in os.listxattr(full)}
            entry.append({name: value for name, value in attributes.items() if name != "security.selinux"})
        found[path] = tuple(entry)
    return found


def carme_data(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=HANG, **more)


def command(*arguments: str) -> list[str]:
    """What runs `carme data`."""
    program = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from carme.cli import program; program()"
    return [sys.executable, "-I", "-c", program, "data", *map(str, arguments)]


def from_and_to(place: Path) -> tuple[Path, Path]:
    """A source and a destination; neither is there yet."""
    return place / "source", place / "target"


def many(top: Path, folders: int, files: int, size: int = 300) -> None:
    """Folders of files, each with contents of its own."""
    for folder in range(folders):
        where = top / f"d{folder}"
        where.mkdir(parents=True)
        for file in range(files):
            (where / f"f{file}").write_bytes(f"{folder}/{file};".encode() * (size // 8))
