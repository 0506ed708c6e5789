"""Work that a page begins and does not wait for."""

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from django.conf import settings
from django.db import close_old_connections

__all__ = ["BackgroundTasks", "background_tasks"]

logger = logging.getLogger(__name__)

THREADS = 16


class _Threads(ThreadPoolExecutor):
    """Threads that keep no connection to the database when they have done their work."""

    def submit(self, fn, /, *args, **kwargs):
        def work():
            try:
                return fn(*args, **kwargs)
            finally:
                close_old_connections()

        return super().submit(work)


class _Locks:
    """Locks by name, which no two processes of the portal hold at once; those of a process end with it.

    Each is one byte of a file, far apart by the name's hash. Such locks (POSIX's, by `fcntl`) belong to a
    process and would be lost if it closed the file once: it stays open.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._opening = threading.Lock()

    def take(self, name: str) -> bool:
        """Whether it was free; this process then has it."""
        with self._opening:
            if self._file is None:
                path = settings.SITE.portal.state_directory / "background.lock"
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _offset(name))
        except BlockingIOError:
            return False
        return True

    def give(self, name: str) -> None:
        """Let others have it."""
        assert self._file is not None
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _offset(name))


def _offset(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


_locks = _Locks()


class BackgroundTasks:
    """Runs functions in other threads, one at a time for each key, among all processes of the portal.

    Args:
        executor: What runs them.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self.executor = executor or _Threads(THREADS, thread_name_prefix="task")
        self._under_way: set[str] = set()
        self._lock = threading.Lock()

    def run(self, key: str, task: Callable[[], None]) -> bool:
        """Run it soon.

        Returns:
            False when one with this key is under way; then nothing is run.
        """
        with self._lock:
            if key in self._under_way or not _locks.take(key):
                return False
            self._under_way.add(key)
        try:
            self.executor.submit(self._run, key, task)
        except RuntimeError:
            # The process ends; whoever comes next finds in the database what is to be done.
            self._done(key)
            return False
        return True

    def _run(self, key: str, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:
            logger.exception("The task %s failed", key)
        finally:
            self._done(key)

    def _done(self, key: str) -> None:
        with self._lock:
            self._under_way.discard(key)
            _locks.give(key)


background_tasks = BackgroundTasks()
"""The background_tasks of this process."""
