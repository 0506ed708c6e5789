"""Whether the site's services answer."""

import http.client
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

from carme.config import Settings

__all__ = ["Answer", "Health", "addresses"]

PATIENCE = 3.0  # seconds


class Answer(NamedTuple):
    """Whether a service answered, and after how many seconds."""

    up: bool
    seconds: float


def addresses(settings: Settings) -> dict[str, str]:
    """Where each service is queried; the answers cost them next to nothing."""
    return {
        "portal": f"http://{settings.portal.listen}/internal/enter",  # 401: nobody is signed in
        "hub": f"{settings.hub.proxy_url}{settings.hub.base_path}hub/health",  # through the proxy
    }


class Health:
    """Asks all services at once.

    Args:
        addresses: A plain HTTP address for each service.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(addresses)), thread_name_prefix="health")

    def check(self) -> dict[str, Answer]:
        """How each service answers now; takes `PATIENCE` seconds at most."""
        return dict(zip(self._addresses, self._threads.map(_ask, self._addresses.values()), strict=True))


def _ask(url: str) -> Answer:
    start = time.monotonic()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    try:
        connection.request("GET", parts.path)
        # Anything that it says itself will do; what a proxy says for it will not.
        up = connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        up = False
    finally:
        connection.close()
    return Answer(up, time.monotonic() - start)
