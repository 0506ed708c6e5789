"""Work that a page begins and does not wait for."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from django.db import close_old_connections

__all__ = ["Errands", "errands"]

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


class Errands:
    """Runs functions in other threads, one at a time for each key.

    Args:
        executor: What runs them.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self.executor = executor or _Threads(THREADS, thread_name_prefix="errand")
        self._under_way: set[str] = set()
        self._lock = threading.Lock()

    def run(self, key: str, errand: Callable[[], None]) -> bool:
        """Run it soon.

        Returns:
            False when one with this key is under way; then nothing is run.
        """
        with self._lock:
            if key in self._under_way:
                return False
            self._under_way.add(key)
        try:
            self.executor.submit(self._run, key, errand)
        except RuntimeError:
            # The process ends; whoever comes next finds in the database what is to be done.
            self._done(key)
            return False
        return True

    def _run(self, key: str, errand: Callable[[], None]) -> None:
        try:
            errand()
        except Exception:
            logger.exception("The errand %s failed", key)
        finally:
            self._done(key)

    def _done(self, key: str) -> None:
        with self._lock:
            self._under_way.discard(key)


errands = Errands()
"""The errands of this process."""
