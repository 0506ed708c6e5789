"""TLS between the agents of a job: both sides show the job's own certificate, and accept no other."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.key import read_private


@dataclass(frozen=True)
class Certificate:
    """The job's certificate, as the two sides of a connection use it."""

    accepting: ssl.SSLContext
    connecting: ssl.SSLContext


def read_certificate(path: Path) -> Certificate:
    """The self-signed certificate and its private key, in the PEM file `path` (0600)."""
    remedy = "Give --certificate a PEM file with the job's self-signed certificate and its private key."
    read_private(path, "certificate", remedy)
    try:
        return Certificate(_context(path, ssl.PROTOCOL_TLS_SERVER), _context(path, ssl.PROTOCOL_TLS_CLIENT))
    except (ssl.SSLError, OSError) as error:
        raise CarmeRuntimeError(f"The certificate {path} cannot be used: {error}.", remedy) from None


def _context(path: Path, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names no host: it is the same on all nodes of the job
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(path)
    context.load_verify_locations(path)
    return context
