"""Keeps the portal true while it serves: follows the broker's news, and finishes what was asked for.

It lives in a process of the web server, so that what the broker says reaches open pages at once, and needs
neither Redis nor Celery. Of several such processes one keeps; when it ends or dies, another goes on.
"""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator

from django.conf import settings
from django.db import close_old_connections

from carme_webui.cluster import broker
from carme_webui.jobs.mirror import follow
from carme_webui.sessions.lifecycle import tend_all

__all__ = ["BrokerSync"]

logger = logging.getLogger(__name__)

# Seconds that the broker holds the answer back while nothing changes.
WAIT = 10.0
# Seconds until the next try after a failure, and between two looks at what is still to be done.
PAUSE = 1.0
# Seconds between two looks whether the process that keeps is still there.
TURN = 0.5


class BrokerSync:
    """Two threads: one follows the broker, one tends to sessions that are being started or stopped.

    They begin when no other process keeps, which a lock on a file says. The kernel takes the lock from a
    process that dies.
    """

    def __init__(self) -> None:
        self._ending = threading.Event()

    def start(self) -> None:
        """Begin, as soon as it is this process's turn. What an earlier one left undone is done first."""
        threading.Thread(target=self._keep, name="keep", daemon=True).start()

    def stop(self) -> None:
        """End soon; nothing is lost by it."""
        self._ending.set()

    def _keep(self) -> None:
        with self._turn():
            if self._ending.is_set():
                return
            steps = {"follow": self._follow, "tend": self._tend}
            threads = [
                threading.Thread(target=self._repeat, args=(step,), name=name, daemon=True)
                for name, step in steps.items()
            ]
            for thread in threads:
                thread.start()
            logger.info("Process %s keeps the portal true", os.getpid())
            for thread in threads:
                thread.join()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other process keeps, or until the end."""
        with (settings.SITE.portal.state_directory / "broker_sync.lock").open("a") as file:
            while not self._ending.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._ending.wait(TURN)
            yield

    def _follow(self) -> None:
        if not follow(broker(), WAIT):
            self._ending.wait(PAUSE)

    def _tend(self) -> None:
        tend_all()
        self._ending.wait(PAUSE)

    def _repeat(self, step: Callable[[], None]) -> None:
        while not self._ending.is_set():
            try:
                step()
            except Exception:
                # A database that is away for a moment must not end the portal's eyes and hands.
                logger.exception("Sync failed; retrying in %.0f s", PAUSE)
                self._ending.wait(PAUSE)
            finally:
                close_old_connections()
