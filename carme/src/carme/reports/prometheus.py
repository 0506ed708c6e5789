"""Questions to the site's Prometheus, which answers by mutual TLS alone."""

import http.client
import json
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

from carme.errors import CarmeError, InvalidRequest
from carme.translation import message as _

__all__ = ["Prometheus", "connection"]

PATIENCE = 10.0  # seconds for one question


class Prometheus:
    """The site's Prometheus.

    Args:
        url: Its address.
        certificates: The folder with `tls.pem` and `ca.crt` of a reader.
    """

    def __init__(self, url: str, certificates: Path) -> None:
        self._url, self._certificates = urlsplit(url), certificates

    def ask(self, path: str, parameters: Sequence[tuple[str, Any]]) -> Any:
        """The whole answer to a question of Prometheus' HTTP API (Prometheus, "HTTP API").

        Raises:
            InvalidRequest: Prometheus says that the question is wrong.
            CarmeError: It does not answer, or cannot.
        """
        try:
            opened = connection(self._url, self._certificates, PATIENCE)
            try:
                opened.request("GET", f"{self._url.path}{path}?{urlencode(parameters)}")
                response = opened.getresponse()
                answer = json.loads(response.read())
            finally:
                opened.close()
            if answer["status"] != "success":
                refused = str(answer.get("error", "it refused the question"))[:500]
                if response.status in (400, 422):
                    raise InvalidRequest(
                        _("Prometheus cannot answer that: {refused}.", refused=refused), field="query"
                    )
                raise ValueError(refused)
            return answer
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise CarmeError(
                _(
                    "The site's metrics cannot be read: {why}.",
                    why=getattr(error, "strerror", None) or error,
                ),
                _(
                    "Try again in a moment; an administrator finds the cause with 'systemctl status "
                    "prometheus'."
                ),
                code="metrics",
            ) from None


class _Elsewhere(http.client.HTTPSConnection):
    """Goes to another address than that of the name for which its server must have a certificate."""

    def __init__(
        self, name: str, address: str, port: int | None, patience: float, tls: ssl.SSLContext
    ) -> None:
        super().__init__(name, port, timeout=patience, context=tls)
        self._address, self._tls = address, tls

    def connect(self) -> None:
        opened = socket.create_connection((self._address, self.port), self.timeout)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = self._tls.wrap_socket(opened, server_hostname=self.host)


def connection(
    address: SplitResult, certificates: Path, patience: float, reached_at: str = ""
) -> http.client.HTTPConnection:
    """A connection to what serves metrics, by mutual TLS where the address is one of `https`.

    Args:
        address: Scheme, host and port.
        reached_at: The host to connect to where the name of `address` may lead nowhere; the server's
            certificate must be for that name all the same. Only with `https`.
        certificates: The folder with `tls.pem` and `ca.crt` of a reader.
        patience: Seconds for each answer.

    Raises:
        OSError: The certificates cannot be read.
    """
    host = address.hostname or ""
    if address.scheme != "https":
        return http.client.HTTPConnection(host, address.port, timeout=patience)
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    context.load_cert_chain(certificates / "tls.pem")
    return _Elsewhere(host, reached_at or host, address.port, patience, context)
