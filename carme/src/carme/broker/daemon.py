"""The program `carme-broker`."""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

from carme.broker.server import Server
from carme.broker.service import Broker
from carme.command_line import add_config
from carme.config import Settings, load
from carme.errors import CarmeError
from carme.garbage import collect_rarely
from carme.slurm import Slurm
from carme.slurm.selection import opened

_log = logging.getLogger("carme.broker")

#: That wait for others, mostly for a directory server: while it is slow for one user, others need some, too.
#: By default there are only a few more than processors.
THREADS = 64


def main(arguments: list[str] | None = None) -> int:
    """Run the broker until a signal stops it; its exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-broker", description="The only gateway to Slurm: serves the portal, the hub and 'carme'."
    )
    add_config(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(serve(load(options.config)))
    except CarmeError as error:
        print(f"carme-broker: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"carme-broker: {error.filename or 'the socket'}: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


async def serve(settings: Settings, slurm: AbstractAsyncContextManager[Slurm] | None = None) -> None:
    """Answer requests until SIGTERM or SIGINT.

    Args:
        settings: The site's.
        slurm: Opens the cluster; by default the site's Slurm.

    Raises:
        OSError, CarmeError: It cannot begin.
        ExceptionGroup: What the broker does in the background has failed in a way that nobody foresaw.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # a connection is a file; the usual limit is 1024
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="broker"))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with slurm or opened(settings) as cluster:
        broker = Broker(settings, cluster)
        await broker.prepare()
        collect_rarely()
        running = asyncio.create_task(broker.run())
        stopping = asyncio.create_task(stop.wait())
        try:
            async with Server(settings, broker):
                notify("READY=1")
                _log.info("Listening on %s.", settings.broker.socket)
                # Without its polls of Slurm it must not go on answering from its last snapshot.
                await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                notify("STOPPING=1")
        finally:
            stopping.cancel()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def notify(state: str) -> None:
    """Notify systemd (Type=notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.connect("\0" + address[1:] if address.startswith("@") else address)
        connection.sendall(state.encode())
