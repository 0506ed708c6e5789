"""Keeps the portal true while it serves: follows the broker's news, and finishes what was asked for.

It lives in the web server's process, so that what the broker says reaches open pages at once, and needs
neither Redis nor Celery.
"""

import logging
import threading
from collections.abc import Callable

from django.db import close_old_connections

from carme_webui.cluster import broker
from carme_webui.jobs.mirror import follow
from carme_webui.sessions.lifecycle import tend_all

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

# Seconds that the broker holds the answer back while nothing changes.
WAIT = 10.0
# Seconds until the next try after a failure, and between two looks at what is still to be done.
PAUSE = 1.0


class Keeper:
    """Two threads: one follows the broker, one tends to sessions that are being started or stopped."""

    def __init__(self) -> None:
        self._ending = threading.Event()

    def start(self) -> None:
        """Begin. What an earlier process left undone is done first."""
        threading.Thread(target=self._repeat, args=(self._follow,), name="follow", daemon=True).start()
        threading.Thread(target=self._repeat, args=(self._tend,), name="tend", daemon=True).start()

    def stop(self) -> None:
        """End soon; nothing is lost by it."""
        self._ending.set()

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
                logger.exception("A round failed; the next one follows")
                self._ending.wait(PAUSE)
            finally:
                close_old_connections()
