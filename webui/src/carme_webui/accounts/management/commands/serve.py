"""`carme-portal serve`: the portal's web server."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from uvicorn import Config
from uvicorn.supervisors import Multiprocess

#: A worker that stands still for so many seconds is replaced.
STANDSTILL_SECONDS = 60


class Command(BaseCommand):
    help = "Serve the portal with uvicorn on the address that 'listen' in [portal] of carme.toml names."

    def handle(self, *args: Any, **options: Any) -> None:
        host, _, port = settings.SITE.portal.listen.rpartition(":")
        config = Config(
            "carme_webui.asgi:worker",
            factory=True,
            host=host,
            port=int(port),
            workers=settings.PROCESSES,
            lifespan="off",
            timeout_worker_healthcheck=STANDSTILL_SECONDS,
            # The reverse proxy on this host says who calls, and whether over TLS.
            proxy_headers=True,
            forwarded_allow_ips="127.0.0.1",
            server_header=False,
            access_log=False,
            # Longer than nginx keeps an idle connection (60 s): if both closed it after the same time, a form
            # could be sent into a connection that is just being closed, and nobody may send it again.
            timeout_keep_alive=75,
            # Streams of events end with the server; pages open new ones.
            timeout_graceful_shutdown=1,
            log_config=None,
        )
        # Also where one process serves: without a supervisor SIGHUP, which reloads, would end it.
        Multiprocess(config, sockets=[config.bind_socket()]).run()
