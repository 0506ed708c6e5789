"""Finished files, each under a hash of all that went into it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .digests import file_digest


@dataclass(frozen=True)
class Entry:
    """A finished file in the cache."""

    file: Path
    digest: str
    built: str


class Cache:
    """Finished files by name and key. A JSON file written last says that the other is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def find(self, name: str, key: str, suffix: str) -> Entry | None:
        """The entry, or None if there is none or it is damaged."""
        file = self.folder / f"{name}-{key}{suffix}"
        try:
            record = json.loads(file.with_suffix(".json").read_text())
            if file_digest(file) == record["digest"]:
                return Entry(file, record["digest"], record["built"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    @contextlib.contextmanager
    def adding(self, name: str, key: str, suffix: str) -> Iterator[Path]:
        """A path to write the file to; it counts only if the block ends well. Older files of that name go."""
        file = self.folder / f"{name}-{key}{suffix}"
        unfinished = self.folder / f"unfinished-{name}{suffix}"
        unfinished.unlink(missing_ok=True)
        try:
            yield unfinished
            record = {
                "digest": file_digest(unfinished),
                "built": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            for old in self.folder.glob(f"{name}-{'[0-9a-f]' * 16}.*"):
                old.unlink()
            unfinished.rename(file)
            replace(file.with_suffix(".json"), json.dumps(record).encode())
        finally:
            unfinished.unlink(missing_ok=True)


def replace(file: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.chmod(0o644)
    unfinished.rename(file)
