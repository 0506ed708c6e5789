"""`carme-portal serve`: the portal's web server."""

import sys
from typing import Any

import uvicorn
from django.conf import settings
from django.core.management.base import BaseCommand

from carme_webui import processes

#: How long a thread may run while others wait.
SWITCH_SECONDS = 0.001


class Command(BaseCommand):
    help = "Serve the portal with uvicorn on the address that 'listen' in [portal] of carme.toml names."

    def handle(self, *args: Any, **options: Any) -> None:
        # Each request has a thread of its own. After each look into the database it waits for those that are
        # making a page, in turns of this length; Python's 5 ms would add up to more than the page takes.
        sys.setswitchinterval(SWITCH_SECONDS)
        host, _, port = settings.SITE.portal.listen.rpartition(":")
        config = uvicorn.Config(
            "carme_webui.asgi:application",
            host=host,
            port=int(port),
            backlog=processes.BACKLOG,
            # The reverse proxy on this host says who calls, and whether over TLS.
            proxy_headers=True,
            forwarded_allow_ips="127.0.0.1",
            server_header=False,
            access_log=False,
            # Longer than nginx keeps an idle connection (60 s): if both closed it after the same time, a form
            # could be sent into a connection that is just being closed, and nobody may send it again.
            timeout_keep_alive=75,
            # Streams of news end with the server; pages open new ones.
            timeout_graceful_shutdown=1,
            log_config=None,
        )
        processes.serve(config, settings.PROCESSES)
