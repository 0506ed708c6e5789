"""Copies that are kept for the next job: one folder of a user's, one entry for each source.

An entry is a folder with `lock`, `about.json` and `data`. Who uses it holds the lock shared, who changes or
removes it holds it alone: what is in use is never removed. `about.json` is written last: without it the copy
is not complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from carme.errors import CarmeError
from carme.staging import tree
from carme.staging.engine import Notify, copy, sync
from carme.staging.options import Options
from carme.storage import fit, space_of
from carme.translation import message as _
from carme.wording import size

__all__ = ["Cache", "CacheEntry", "measure"]

#: The names of entries: a stage's key; with a job's number the copy of a source that has changed meanwhile.
ENTRY = re.compile(r"[0-9a-f]{24}(-[0-9]+)?")
#: What stays free on a disk, as a part of it.
RESERVE = 0.05


@dataclass(frozen=True)
class CacheEntry:
    """A complete entry: when it was last used (seconds since 1970), and its size in bytes."""

    key: str
    used: float
    size: int


class Cache:
    """A user's copies in one place.

    Args:
        folder: Where they lie; it must be there and belong to this user alone.
        limit: What they may take, in bytes; 0: as much as leaves a twentieth of the disk free.

    Raises:
        CarmeError: The folder is not there, or is not this user's own.
    """

    def __init__(self, folder: str, limit: int = 0) -> None:
        self.folder, self.limit = folder, limit
        try:
            status = os.lstat(folder)
        except OSError as error:
            raise CarmeError(
                _(
                    "There is no place for copies on this node: {folder}: {why}.",
                    folder=tree.shown(folder),
                    why=tree.reason(error),
                ),
                _("Tell an administrator; the prolog makes that folder."),
            ) from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise CarmeError(
                _("{folder} is not a private folder of yours.", folder=tree.shown(folder)),
                _("Tell an administrator."),
            )

    def hold(
        self, key: str, source: str, version: str = "", *, job: str = "0", notify: Notify | None = None
    ) -> tuple[str, int, bool]:
        """A complete copy, made or brought up to date where that is necessary.

        Args:
            key: The entry's name.
            source: What is copied.
            version: The digest of what never changes; else the copy is compared by times and sizes.
            job: The job that asks, for a copy of its own where another one uses what is out of date.
            notify: Called with the progress of copying.

        Returns:
            The copy's path, a descriptor that keeps it in use while it is open, and whether it was there.

        Raises:
            CarmeError: It cannot be copied, or there is no room for it.
        """
        lock = self._locked(key, fcntl.LOCK_SH)
        try:
            if self._is_current(key, source, version):
                os.utime(lock)
                return self._data(key, source), lock, True
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._about(key) is not None:
                    os.close(lock)
                    lock = -1
                    # Another job works with what was there before.
                    return self.hold(
                        f"{key.partition('-')[0]}-{job}", source, version, job=job, notify=notify
                    )
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Somebody else may have been here first.
            if self._is_current(key, source, version):
                fcntl.flock(lock, fcntl.LOCK_SH)
                return self._data(key, source), lock, True
            self._fill(key, source, version, notify)
            fcntl.flock(lock, fcntl.LOCK_SH)
            held, lock = lock, -1
            return self._data(key, source), held, False
        except BaseException:
            if lock >= 0:
                os.close(lock)
            raise

    def known(self) -> list[CacheEntry]:
        """The complete entries, the one that was used last at the end."""
        found = []
        for key in self._keys():
            about = self._about(key)
            with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
                if about is not None:
                    used = os.stat(f"{self.folder}/{key}/lock").st_mtime
                    found.append(CacheEntry(key, used, int(about["bytes"])))
        return sorted(found, key=lambda each: each.used)

    def remove(self, key: str) -> bool:
        """Remove an entry; False where it is in use or not there."""
        if not ENTRY.fullmatch(key):
            return False
        try:
            lock = os.open(f"{self.folder}/{key}/lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.open(self.folder, tree.FOLDER)
            try:
                # First what says that it is complete, and the lock at the very end.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{key}/about.json", dir_fd=here)
                with contextlib.suppress(FileNotFoundError):
                    entry = os.open(key, tree.FOLDER, dir_fd=here)
                    try:
                        tree.remove(entry, "data")
                    finally:
                        os.close(entry)
                tree.remove(here, key)
            finally:
                os.close(here)
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(lock)
        return True

    def make_room(self, wanted: int, keep: str = "") -> None:
        """Remove what was used least recently until so many bytes fit.

        Raises:
            CarmeError: They cannot.
        """
        if self.limit and wanted > self.limit:
            raise CarmeError(
                _(
                    "{wanted} are more than copies may take here ({limit}).",
                    wanted=size(wanted),
                    limit=size(self.limit),
                ),
                _("Stage less, or stage to scratch."),
                field="stage",
            )
        entries = [each for each in self.known() if each.key != keep]
        taken = sum(each.size for each in entries)
        for entry in [*entries, None]:
            if (not self.limit or taken + wanted <= self.limit) and free(self.folder) >= wanted:
                return
            if entry is not None and self.remove(entry.key):
                taken -= entry.size
        raise CarmeError(
            _(
                "There is not enough space for {wanted} in {folder}: you have {free} free, and the "
                "copies there are in use.",
                wanted=size(wanted),
                folder=tree.shown(self.folder),
                free=size(free(self.folder)),
            ),
            _("Wait until other jobs have ended, stage less, or stage to scratch."),
            field="stage",
        )

    def _keys(self) -> Iterator[str]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if ENTRY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield entry.name

    def _locked(self, key: str, how: int) -> int:
        """The entry's lock; the entry is made if it is not there."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{self.folder}/{key}", 0o700)
            try:
                lock = os.open(
                    f"{self.folder}/{key}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
            except FileNotFoundError:
                continue  # just removed
            fcntl.flock(lock, how)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)

    def _about(self, key: str) -> dict[str, Any] | None:
        try:
            with open(f"{self.folder}/{key}/about.json", encoding="utf-8") as file:
                about = json.load(file)
        except (OSError, ValueError):
            return None
        return about if isinstance(about, dict) else None

    def _data(self, key: str, source: str) -> str:
        data = f"{self.folder}/{key}/data"
        return data if os.path.isdir(source) else f"{data}/{os.path.basename(source)}"

    def _is_current(self, key: str, source: str, version: str) -> bool:
        about = self._about(key)
        if about is None or about.get("source") != source or about.get("version") != version:
            return False
        if version:
            return True
        differing = 0

        def count(what: Any) -> None:
            nonlocal differing
            differing += isinstance(what, tuple)

        if not os.path.isdir(source):
            cached, current = os.stat(self._data(key, source)), os.stat(source)
            return (cached.st_size, cached.st_mtime_ns) == (current.st_size, current.st_mtime_ns)
        result = sync(source, self._data(key, source), dry_run=True, notify=count)
        return result.ok and not differing

    def _fill(self, key: str, source: str, version: str, notify: Notify | None) -> None:
        data = f"{self.folder}/{key}/data"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.folder}/{key}/about.json")
        before = measure(data) if os.path.isdir(data) else 0
        wanted, files = usage(source)
        self.make_room(max(0, wanted - before), keep=key)
        os.makedirs(data, 0o700, exist_ok=True)
        fit(data, files, wanted)
        # The nodes of a job, or of many, often begin to read the same at the same moment.
        turn = zlib.crc32(socket.gethostname().encode()) / 2**32
        if os.path.isdir(source):
            result = sync(source, data, Options(estimate=True, turn=turn), notify=notify)
        else:
            result = copy(source, f"{data}/{os.path.basename(source)}", Options(turn=turn), notify=notify)
        if not result.ok:
            first = result.problems[0]
            more = f" and {len(result.problems) - 1} more" if len(result.problems) > 1 else ""
            raise CarmeError(
                _(
                    "{source} cannot be copied: {path}: {reason}{more}.",
                    source=tree.shown(source),
                    path=tree.shown(first.path),
                    reason=first.reason,
                    more=more,
                ),
                _("Fix that, then start again; files that are already copied are skipped."),
                field="stage",
            )
        about = {"source": source, "version": version, "bytes": wanted, "made": time.time()}
        writing = f"{self.folder}/{key}/about.new"
        with open(writing, "w", encoding="utf-8") as file:
            json.dump(about, file)
        os.rename(writing, f"{self.folder}/{key}/about.json")


def free(folder: str) -> int:
    """Bytes that copies of this user may still take on the disk of a folder, by its room and their quota."""
    space = space_of(folder)
    return max(0, min(space.left, space.free - int(space.size * RESERVE)))


def measure(path: str) -> int:
    """The bytes that files at or below a path take; what cannot be read counts nothing."""
    return usage(path)[0]


def usage(path: str) -> tuple[int, int]:
    """Those bytes, and how many files they are."""
    if not os.path.isdir(path):
        return os.stat(path).st_size, 1
    total = files = 0
    waiting = [path]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    with contextlib.suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        files += 1
    return total, files
