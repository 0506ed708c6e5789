"""Follows the broker's events, and starts and stops sessions: `carme-portal sync`, one process of a site.

It is not work for Celery's workers: it follows a stream, sessions start and stop within a second, and both go
on while Redis is away.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from django.conf import settings
from django.db import close_old_connections

from carme_webui.cluster import broker
from carme_webui.jobs.mirror import follow
from carme_webui.notifier import notifier
from carme_webui.sessions.lifecycle import due_sessions, tend_named

__all__ = ["BrokerSync"]

logger = logging.getLogger(__name__)

# Seconds that the broker holds the answer back while nothing changes.
WAIT = 10.0
# Seconds until the next try after a failure, and between two checks of what is still to be done.
PAUSE = 1.0


class BrokerSync:
    """Two threads: one follows the broker, one looks after sessions that are being started or stopped.

    What an earlier process left undone is done first: the database knows it.
    """

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._hub_calls = ThreadPoolExecutor(settings.SESSIONS_AT_ONCE, thread_name_prefix="session")
        self._in_progress: set[str] = set()
        self._requests = notifier.session_requests()
        self.threads = [
            threading.Thread(target=self._repeat, args=(step,), name=step.__name__, daemon=True)
            for step in (self._follow, self._tend)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End soon; nothing is lost by it."""
        self._ending.set()

    def wait(self) -> None:
        """Until it is stopped and JupyterHub has answered; an unanswered broker is not waited for."""
        self._ending.wait()
        self._hub_calls.shutdown(cancel_futures=True)

    def _follow(self) -> None:
        if not follow(broker(), WAIT):
            self._ending.wait(PAUSE)

    def _tend(self) -> None:
        for name in due_sessions():
            if name not in self._in_progress:
                self._in_progress.add(name)
                self._hub_calls.submit(self._tend_session, name)
        close_old_connections()
        self._requests.wait(PAUSE)

    def _tend_session(self, name: str) -> None:
        try:
            tend_named(name)
        except Exception:
            logger.exception("Session %s could not be looked after; the next try follows", name)
        finally:
            self._in_progress.discard(name)
            close_old_connections()

    def _repeat(self, step: Callable[[], None]) -> None:
        while not self._ending.is_set():
            try:
                step()
            except Exception:
                if self._ending.is_set():
                    return  # no more work for sessions is begun
                # A database that is away for a moment must not end the sync.
                logger.exception("Sync failed; retrying in %.0f s", PAUSE)
                self._ending.wait(PAUSE)
            finally:
                close_old_connections()
