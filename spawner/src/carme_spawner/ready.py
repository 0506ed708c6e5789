"""`POST /api/carme/ready`: a single-user server says where it listens."""

import asyncio
import ipaddress
import re
import socket
from typing import cast

from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.iostream import IOStream

from carme.sessions import Step
from carme_spawner.report_handler import ReportHandler
from carme_spawner.reports import Ready
from carme_spawner.spawner import CarmeSpawner


class ReadyHandler(ReportHandler):
    """Takes host and port for the server that the request's own token belongs to."""

    async def post(self) -> None:
        spawner = self.own_spawner()
        if not spawner.job_id:
            # A fast job can be ahead of the broker's answer to its submitter; the server tries again.
            raise web.HTTPError(503, "The session is still being submitted. Report again in a moment.")
        ready = self.report(Ready)
        address = await self.checked_address(ready.host, spawner)
        marks = {Step(name): at for name, at in ready.marks if at is not None}
        if not spawner.report_ready(address, ready.port, marks):
            raise web.HTTPError(
                409, "This server has reported another address before. Start the session again to move it."
            )
        self.log.info("%s is ready at %s port %s", spawner._log_name, address, ready.port)
        self.set_status(204)

    async def checked_address(self, host: str, spawner: CarmeSpawner) -> str:
        """The numeric address of `host`, if the server can be there: on a node of its job or at the sender.

        The hub's proxy connects to it, so it must not lead to services of other machines or of the hub's own.
        """
        addresses = await resolve(host)
        job = spawner.watcher.find(int(spawner.job_id))
        allowed: set[str] = set()
        for name in node_names(job.node_list if job else ""):
            allowed |= set(await resolve(name))
        peer = self.peer()
        if not ipaddress.ip_address(peer).is_loopback:
            allowed.add(peer)
        for address in addresses:
            if address in allowed:
                return address
        if job is None or not job.is_running:
            # A hub that has just started may learn only a moment later where the job runs.
            raise web.HTTPError(
                503,
                "The hub does not yet know the nodes of the session's job. Report again in a moment.",
            )
        raise web.HTTPError(
            400,
            f"The host of a server must be a node of its job, and {host} is not. "
            "Report the address of the node at which the hub can reach the server.",
        )

    def peer(self) -> str:
        """The address of the connection itself: what a header says about it can be made up."""
        stream = cast(HTTP1Connection, self.request.connection).stream
        connection = cast(IOStream, stream).socket
        assert connection is not None
        return plain(connection.getpeername()[0])


def plain(address: str) -> str:
    """An address in its shortest form, without zone and without IPv4 being wrapped in IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


async def resolve(host: str) -> list[str]:
    """The addresses of a host name or of an address; none if there is no such host."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [plain(str(entry[4][0])) for entry in found]


def node_names(node_list: str) -> list[str]:
    """The names in Slurm's short form: `n[1-2,07],gpu1` is n1, n2, n07 and gpu1."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", word):
            parts = [text] if text else [number for part in ranges.split(",") for number in numbers(part)]
            expanded = [head + part for head in expanded for part in parts]
        names += expanded
    return names


def numbers(part: str) -> list[str]:
    """`08-10` is 08, 09 and 10; `7` is 7."""
    first, _, last = part.partition("-")
    if not last:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
