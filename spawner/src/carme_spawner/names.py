"""The names under which hub and proxy reach the servers of sessions.

A server's name holds its address and its identity: `10-77-0-3.IDENTITY.session.invalid`. Its certificate is
good for `*.IDENTITY.session.invalid` and nothing else, so anyone who takes the port of a server that has just
ended cannot pass for it, not even the owner of another session on the same node. `.invalid` never resolves
(RFC 6761): only who knows this rule gets there, no name server is queried. The proxy has the same rule
(`session-names.cjs` of its role).
"""

import ipaddress
import socket

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

SUFFIX = ".session.invalid"


def server_name(address: str, identity: str) -> str:
    """The name of the server with this identity at a numeric address."""
    return f"{ipaddress.ip_address(address).exploded.replace('.', '-').replace(':', '-')}.{identity}{SUFFIX}"


def name_pattern(identity: str) -> str:
    """What the certificate of a server is good for: it may be on any node."""
    return f"*.{identity}{SUFFIX}"


def address_in(name: str) -> str | None:
    """The address that a server's name holds; None if it is another kind of name."""
    if not name.endswith(SUFFIX):
        return None
    parts = name.partition(".")[0].split("-")
    try:
        return str(ipaddress.ip_address((":" if len(parts) == 8 else ".").join(parts)))
    except ValueError:
        return None


class ServerResolver(AbstractResolver):
    """Finds servers by their names, and everything else as usual."""

    def __init__(self) -> None:
        self._usual = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """As aiohttp asks for it. Raises OSError."""
        address = address_in(host)
        if address is None:
            return await self._usual.resolve(host, port, family)
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": socket.IPPROTO_TCP,
                "flags": socket.AI_NUMERICHOST,
            }
        ]

    async def close(self) -> None:
        """Nothing is held."""
