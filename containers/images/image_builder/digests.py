"""Hashes that say whether what an image was built from has changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from .errors import BuildError

SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "build", "dist", ".*_cache", "*.sif")


def file_digest(file: Path) -> str:
    """The SHA-256 of a file, as manifests have it."""
    with file.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()


def key_of(*parts: object) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def tree_digest(folder: Path) -> str:
    """A hash of the names and contents of the files that a build would copy from a folder."""
    if not folder.is_dir():
        raise BuildError(f"The folder {folder} is missing. Run the build from a complete checkout.")
    lines: list[str] = []
    for path, folders, files in os.walk(folder):
        ignored = SKIPPED(path, folders + files)
        folders[:] = sorted(set(folders) - ignored)
        for name in sorted(set(files) - ignored):
            file = Path(path, name)
            lines.append(f"{file.relative_to(folder)} {file_digest(file)}")
    return key_of(lines)
