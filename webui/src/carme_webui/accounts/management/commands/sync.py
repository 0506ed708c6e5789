"""`carme-portal sync`: follow the broker, and start and stop sessions."""

import fcntl
import signal
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from carme_webui.broker_sync import BrokerSync


class Command(BaseCommand):
    help = "Follow the broker's events, and start and stop sessions; one process of a site does it."

    def handle(self, *args: Any, **options: Any) -> None:
        # Two would ask the hub twice for each session. The kernel forgets the lock with its process.
        with (settings.SITE.portal.state_directory / "sync.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CommandError(
                    f"'carme-portal sync' already runs for this site (it holds {lock.name}). "
                    "Stop that one first, for instance by: systemctl stop carme-sync"
                ) from None
            sync = BrokerSync()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: sync.stop())
            sync.start()
            sync.wait()
