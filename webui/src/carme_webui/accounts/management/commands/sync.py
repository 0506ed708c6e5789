"""`carme-portal sync`: follow the broker, and start and stop sessions."""

import signal
from typing import Any

from django.core.management.base import BaseCommand

from carme_webui.broker_sync import BrokerSync


class Command(BaseCommand):
    help = "Follow the broker's events, and start and stop sessions; one process of a site does it."

    def handle(self, *args: Any, **options: Any) -> None:
        sync = BrokerSync()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sync.stop())
        sync.start()
        sync.wait()
