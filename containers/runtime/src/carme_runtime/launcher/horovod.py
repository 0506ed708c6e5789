"""Scripts for Horovod: what `horovodrun` passes to the ranks, and the server at which they find each other.

Run as a program on the first node, this module is that server: Horovod's own, but on one address.
"""

import asyncio
import contextlib
import importlib.util
import os
import socketserver
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric, connect
from carme_runtime.launcher.placement import Place, is_spread
from carme_runtime.ranks import without_secrets

START_SECONDS = 60.0  # how long the server may take until it listens
STOP_SECONDS = 5.0
WAITING_RANKS = 1024  # that may connect at the same time


def check_installed() -> None:
    """Raise CarmeRuntimeError where this Python has no Horovod."""
    if not importlib.util.find_spec("horovod"):
        raise CarmeRuntimeError(
            f"Horovod is not installed for {sys.executable}.",
            "Use the image of PyTorch or TensorFlow, where the site has built Horovod into it, or change the "
            "script's import to 'import carme_runtime.horovod as hvd', which needs no --backend.",
        )


def variables(places: list[Place], port: int, caller: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """By rank, what Horovod reads on top of every run's variables; `port` is the server's.

    Raises:
        CarmeRuntimeError: The first node has an address of the kind that Horovod cannot use.
    """
    address = _address(places)
    shared = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
    # A rank's peers across nodes are those with its number on theirs.
    across: dict[int, list[int]] = {}
    for place in places:
        across.setdefault(place.local_rank, []).append(place.rank)
    shown: dict[int, dict[str, str]] = {}
    for place in places:
        peers = across[place.local_rank]
        numbers = {
            "RANK": place.rank,
            "SIZE": len(places),
            "LOCAL_RANK": place.local_rank,
            "LOCAL_SIZE": place.local_size,
            "CROSS_RANK": peers.index(place.rank),
            "CROSS_SIZE": len(peers),
        }
        interface = place.member.interface if is_spread(places) else "lo"
        own = {"HOROVOD_HOSTNAME": place.member.host}
        if interface := caller.get("HOROVOD_GLOO_IFACE", interface):
            own["HOROVOD_GLOO_IFACE"] = interface
        shown[place.rank] = shared | own | {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}
    return shown


@contextlib.asynccontextmanager
async def rendezvous(
    places: list[Place], environment: Mapping[str, str]
) -> AsyncIterator[dict[int, dict[str, str]]]:
    """Run the server for the ranks at `places`; by rank, the `variables` with which they find it.

    It runs on the first node, on a connection of its own to the fabric: when this process ends, in whatever
    way, the node's agent ends the server.

    Raises:
        CarmeRuntimeError: It could not be started.
    """
    variables(places, 0, environment)  # an address that is no use is to be seen before anything is started
    fabric, node = await connect(os.environ), places[0].member.number
    try:
        yield variables(places, await _start(fabric, places, environment), environment)
    finally:
        fabric.send(node, {"type": "stop"})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_until_over(fabric, node), STOP_SECONDS)
        await fabric.close()


async def _start(fabric: Fabric, places: list[Place], environment: Mapping[str, str]) -> int:
    """Start the server; the port on which it listens."""
    node = places[0].member.number
    slots = {place.member.host: place.local_size for place in places}
    plan = ",".join(f"{host}:{count}" for host, count in slots.items())
    request = {
        "command": [sys.executable, "-m", __name__, _address(places), plan],
        "cwd": "/",  # the user's folder may have modules of the names that the server imports
        "environment": without_secrets(environment),
        "ranks": [{"rank": 0, "environment": {"PYTHONUNBUFFERED": "1"}}],
    }
    fabric.send(node, {"type": "start"} | request)
    try:
        return await asyncio.wait_for(_port(fabric, places), START_SECONDS)
    except asyncio.TimeoutError:
        raise _not_started(places, f"It was not there after {START_SECONDS:.0f} s.") from None


async def _port(fabric: Fabric, places: list[Place]) -> int:
    """What the server says first."""
    message = {1: "", 2: ""}
    async for event in _events(fabric, places[0].member.number):
        if event["type"] == "output":
            message[event["stream"]] += event["text"]
            if message[1].endswith("\n"):
                return int(message[1])
        elif event["type"] == "refused":
            raise _not_started(places, event["message"])
    reason = (message[2].strip().splitlines() or ["The node was lost"])[-1]
    raise _not_started(places, reason.rstrip(".") + ".")


async def _until_over(fabric: Fabric, node: int) -> None:
    async for _ in _events(fabric, node):
        pass


async def _events(fabric: Fabric, node: int) -> AsyncIterator[dict[str, Any]]:
    """What the node says of the server, until that has ended or the node is out of reach."""
    while True:
        event = await fabric.next_event()
        if event.gone or node not in {member.number for member in fabric.members.present}:
            return
        if event.node == node:
            yield event.content
            if event.content["type"] == "over":
                return


def _address(places: list[Place]) -> str:
    first = places[0].member
    address = first.address if is_spread(places) else "127.0.0.1"
    if ":" in address:
        raise CarmeRuntimeError(
            f"Horovod's ranks find each other by IPv4, but {first.host} has the address {address}.",
            "Use one node (--nodes 1), or carme_runtime.horovod instead of Horovod, without --backend.",
        )
    return address


def _not_started(places: list[Place], reason: str) -> CarmeRuntimeError:
    host = places[0].member.host
    return CarmeRuntimeError(
        f"The server at which Horovod's ranks find each other could not be started on {host}: {reason}",
        "See that the same Python with Horovod is on all nodes, and try again.",
    )


def main() -> None:
    """Serve at the address that is the first argument, for the hosts of the second, until a signal comes."""
    # Optional: what check_installed looks for.
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts  # pyright: ignore[reportMissingImports]
    from horovod.runner.http.http_server import (  # pyright: ignore[reportMissingImports]
        RendezvousHandler,
        RendezvousHTTPServer,
    )

    class Server(RendezvousHTTPServer):
        request_queue_size = WAITING_RANKS
        daemon_threads = True

        def server_bind(self) -> None:
            # Not that of HTTPServer, which asks DNS for the host's name.
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    hosts = parse_hosts(sys.argv[2])
    server = Server((sys.argv[1], 0), RendezvousHandler, 0)
    server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
    print(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    main()
