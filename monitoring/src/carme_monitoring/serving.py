"""Serves metrics over HTTP: on loopback to everybody, else by mutual TLS to those who hold a certificate.

What users' jobs do is private to them. So beyond loopback a scrape must show a certificate that the site's
monitoring authority made for clients; see `carme_monitoring.certificates`.
"""

import argparse
import contextlib
import gc
import gzip
import ipaddress
import logging
import signal
import socket
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from carme_monitoring.exposition import CONTENT_TYPE, text

__all__ = ["MetricsServer", "ServingFailed", "add_options", "serve"]

PATIENCE = 5.0  # seconds for a handshake, and for each part of a request
CONNECTIONS = 4  # of one address at a time: who stalls keeps nobody else from scraping
CONNECTIONS_OF_ALL = 64
PACKING = 1


class ServingFailed(Exception):
    """Metrics cannot be served as requested; the text says why and what to do."""


def add_options(parser: argparse.ArgumentParser, listen: str) -> None:
    """The options of every exporter; `listen` is the default address."""
    parser.add_argument("--listen", default=listen, metavar="ADDRESS:PORT", help="default: %(default)s")
    parser.add_argument(
        "--certificates", type=Path, metavar="FOLDER",
        help="tls.pem and ca.crt: serve by TLS to those alone whose certificate is of the same authority; "
        "without it only loopback can be listened on",
    )  # fmt: skip


def serve(program: str, options: argparse.Namespace, collector: Collector) -> int:
    """Serve what the collector finds until SIGTERM or SIGINT; the program's exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server = MetricsServer(options.listen, registry, options.certificates)
    except ServingFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    # What is there now stays; and a scrape makes thousands of objects that all go at its end.
    gc.freeze()
    gc.set_threshold(50_000)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    scheme = "https" if options.certificates else "http"
    print(f"Serving metrics at {scheme}://{options.listen}/metrics", flush=True)
    ended.wait()
    server.shutdown()
    return 0


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every few seconds is not worth a line."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a registry until `shutdown`.

    Args:
        listen: `ADDRESS:PORT`.
        registry: What a scrape returns.
        certificates: The folder with `tls.pem` (key and certificate) and `ca.crt`; None: plain HTTP, which is
            for loopback alone.

    Raises:
        ServingFailed: The address or the certificates cannot be used.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, listen: str, registry: CollectorRegistry, certificates: Path | None) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal():
            raise ServingFailed(f"--listen must be like 127.0.0.1:9750, not {listen!r}.")
        if certificates is None and not _is_loopback(host):
            raise ServingFailed(
                f"{listen} is open to others, and what jobs do is private. "
                "Name the folder of certificates with --certificates, or listen on 127.0.0.1."
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._context = _context(certificates) if certificates else None
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()
        try:
            super().__init__((host, int(port)), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ServingFailed(
                f"{listen} cannot be used: {why}. Choose another address with --listen."
            ) from None
        self.set_app(_application(registry))

    def server_bind(self) -> None:
        # WSGIServer would look its own name up, which takes seconds where no name server answers.
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the address has a connection left."""
        with self._lock:
            host = str(client_address[0])
            if self._open[host] >= CONNECTIONS or self._open.total() >= CONNECTIONS_OF_ALL:
                return False
            self._open[host] += 1
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection in its own thread, handshake included: a client that stalls holds up none."""
        try:
            with contextlib.suppress(OSError):  # TLS errors are among them: a client without a certificate
                request.settimeout(PATIENCE)
                if self._context:
                    request = self._context.wrap_socket(request, server_side=True)
                self.finish_request(request, client_address)
        finally:
            with self._lock:
                self._open[str(client_address[0])] -= 1
                self._open += Counter()  # forget addresses without connections
            self.shutdown_request(request)


def _application(registry: CollectorRegistry) -> Callable[..., list[bytes]]:
    """Answers every path with all metrics; packed for clients that accept that, as Prometheus does."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return [b"Metrics are read by GET.\n"]
        body = text(registry.collect())
        headers = [("Content-Type", CONTENT_TYPE)]
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            # The fastest level packs metrics nearly as well as the best does.
            body = gzip.compress(body, PACKING)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return answer


def _is_loopback(host: str) -> bool:
    """Whether only this host can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(folder / "tls.pem")
        context.load_verify_locations(folder / "ca.crt")
    except OSError as error:
        raise ServingFailed(
            f"The certificates in {folder} cannot be used: {error.strerror or error}. "
            "There must be tls.pem (key and certificate) and ca.crt, readable by this account; "
            "the Ansible playbook makes them."
        ) from None
    return context
