"""The folder at a destination that an unfinished run leaves, and the lock in it.

It needs little, so that a run that finds a few changed files does not wait for its imports.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time

from carme.errors import CarmeError
from carme.staging.options import shown
from carme.translation import message as _

__all__ = ["JOURNAL", "State"]

#: The record of what is done, and what belongs to it while it is written.
JOURNAL = "journal.sqlite"
_FILES = (JOURNAL, f"{JOURNAL}-journal", "boot", "lock")


class State:
    """That folder; who has it is the only one that copies to that destination.

    Args:
        folder: Its path; it is made if it is not there.

    Raises:
        CarmeError: Another run is at work there, or the folder is somebody else's.
        OSError: It cannot be made.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        # Anyone who may write to the destination could have put something else there.
        status = os.lstat(folder)
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            raise CarmeError(
                _("{folder} is not a folder of yours.", folder=shown(folder)),
                _("Check what it is, and remove it before you copy."),
            )
        #: The lock, held until it is closed, also by workers that have it from us.
        self.lock = self._take()
        try:
            #: Whether an unfinished run has left it.
            self.resumed = self._is_there(JOURNAL) or self._is_there("boot")
            #: Whether the host went down since that one began: what it wrote may be lost.
            self.down = self.resumed and self._read("boot") != _boot()
            if not self.resumed:
                self.begin()
        except BaseException:
            os.close(self.lock)
            raise

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(self._path(name))

    def _read(self, name: str) -> str:
        try:
            with open(self._path(name), encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def begin(self) -> None:
        """Note during which of the host's starts this is; the journal knows of earlier ones."""
        try:
            with open(self._path("boot"), "w", encoding="ascii") as file:
                file.write(_boot())
        except OSError:
            # Half of it would be taken for an earlier start.
            with contextlib.suppress(OSError):
                os.unlink(self._path("boot"))
            raise

    def _take(self) -> int:
        # The workers of a run that was killed may need a moment to end.
        for _turn in range(50):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(self._path("lock"), flags, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A run that has just ended takes the file away.
                if os.fstat(lock).st_nlink:
                    return lock
            os.close(lock)
            time.sleep(0.1)
        raise CarmeError(
            _("Another copy to {folder} is under way.", folder=shown(os.path.dirname(self.folder))),
            _("Wait for it, or end it; then run the same command again."),
        )

    def whole_seconds(self) -> bool:
        """Whether the file system keeps times in whole seconds only."""
        os.utime(self.lock, ns=(123_456_789, 123_456_789))
        return os.fstat(self.lock).st_mtime_ns % 10**9 == 0

    def close(self, *, finished: bool) -> None:
        """Give it back; a run that is finished leaves nothing behind."""
        if finished:
            for name in _FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(name))
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
        os.close(self.lock)


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
