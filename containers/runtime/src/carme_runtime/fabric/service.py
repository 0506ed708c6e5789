"""What an agent does once the job's command runs, or on a node that joins."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import handshake, local_socket, mpi
from carme_runtime.fabric.agent import HANDSHAKE_SECONDS, Agent
from carme_runtime.fabric.child import Child
from carme_runtime.fabric.frames import UNKNOWN_PEER_LIMIT, FrameError, Link, LinkClosed
from carme_runtime.fabric.members import Member, Members
from carme_runtime.fabric.tls import Certificate, read_certificate
from carme_runtime.key import read_key
from carme_runtime.ranks import Node
from carme_runtime.ranks.waiting import call_on_exit

CONNECT_SECONDS = 10.0
LOST = 1  # exit code of an agent that has lost the job's first node
ENTER_SECONDS = 30.0  # in which a node that gets no processor tries again

log = logging.getLogger("carme-agent")


def serve(
    options: Namespace,
    command: Child,
    environment: Mapping[str, str],
    network: socket.socket,
    local: socket.socket,
) -> int:
    """Serve the job as the agent of its first node until its command ends; the command's exit code.

    Args:
        options: The program's, see `command.py`.
        command: Runs already.
        environment: The command's.
        network, local: Sockets that listen for other nodes and for clients on this one; closed afterwards.

    Raises:
        CarmeRuntimeError: The key or the certificate cannot be used.
    """
    _log_to_stderr()
    key, certificate = read_key(options.key_file), _certificate(options)
    return asyncio.run(_serve(options, command, environment, network, local, key, certificate))


async def _serve(
    options: Namespace,
    command: Child,
    environment: Mapping[str, str],
    network: socket.socket,
    local: socket.socket,
    key: bytes,
    certificate: Certificate | None,
) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, command.send, number)
    call_on_exit(command.pid, ended.set_result)
    node = Node(environment, options.listen, options.key_file)
    node.announce_agent(Path(local.getsockname()))
    members = Members.of([Member(number=0, **node.describe())], [], options.nodes)
    agent = Agent(node, members, 0, folder=Path(local.getsockname()).parent)
    try:
        agent.serve_network(network, key, certificate)
        await agent.serve_clients(local)
        await ended
        return command.wait()
    finally:
        await agent.close()


def join(options: Namespace, patience: float = 0.0) -> int:
    """Be the agent of another node until the job is over, or a signal comes; the exit code.

    Args:
        options: The program's, see `command.py`.
        patience: Seconds after SIGTERM in which the job may end by itself: who started it may have got the
            signal as well, and this node is not to be taken for lost meanwhile.

    Returns:
        0 when the job is over, `LOST`, or 143 after a signal.

    Raises:
        CarmeRuntimeError: The first node's agent does not answer, or does not let this node in.
    """
    _log_to_stderr()
    local = local_socket.listen(options.socket or local_socket.default_path(os.environ))
    bound = Path(local.getsockname())
    try:
        return asyncio.run(_join(options, local, patience))
    finally:
        local.close()  # first: file systems of a network keep what is open by another name
        bound.unlink(missing_ok=True)


async def _enter(options: Namespace, key: bytes) -> tuple[Link, Node, int, Members]:
    """What `_introduce` returns. The first agent gives up who is slow; who was slow tries again."""
    end = time.monotonic() + ENTER_SECONDS
    while True:
        began = time.monotonic()
        try:
            return await _introduce(options, key)
        except CarmeRuntimeError:
            now = time.monotonic()
            if now - began < HANDSHAKE_SECONDS or now >= end:
                raise


async def _introduce(options: Namespace, key: bytes) -> tuple[Link, Node, int, Members]:
    """Be let in by the first node's agent: the link to it, this node, its number, and who is there."""
    host, _, port = options.join.rpartition(":")
    host = host.strip("[]")
    certificate = _certificate(options)
    connecting = Link.connect(host, int(port), UNKNOWN_PEER_LIMIT, certificate and certificate.connecting)
    try:
        link = await asyncio.wait_for(connecting, CONNECT_SECONDS)
    except ssl.SSLError as error:
        raise CarmeRuntimeError(
            f"What listens at {options.join} does not use this job's certificate ({error.reason}).",
            "Give --key-file, --certificate and --join of the same job.",
        ) from None
    except (OSError, asyncio.TimeoutError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise CarmeRuntimeError(
            f"The first node's agent does not answer at {options.join}: {reason}.",
            "See whether the job still runs, and whether the nodes reach each other.",
        ) from None
    try:
        node = Node(mpi.without_container(os.environ), link.local_address(), options.key_file)
        await asyncio.wait_for(handshake.join(link, key), CONNECT_SECONDS)
        link.send({"node": node.describe()})
        number = int((await asyncio.wait_for(link.receive(), CONNECT_SECONDS))["number"])
        members = Members.from_json((await asyncio.wait_for(link.receive(), CONNECT_SECONDS))["members"])
    except handshake.WrongKey:
        link.close()
        raise CarmeRuntimeError(
            f"What listens at {options.join} does not hold this job's key.",
            "Give --key-file and --join of the same job.",
        ) from None
    except (FrameError, LinkClosed, KeyError, asyncio.TimeoutError):
        link.close()
        raise CarmeRuntimeError(
            f"The agent at {options.join} did not let this node in.", "Its log, the job's output, says why."
        ) from None
    return link, node, number, members


async def _join(options: Namespace, local: socket.socket, patience: float) -> int:
    loop = asyncio.get_running_loop()
    link, node, number, members = await _enter(options, read_key(options.key_file))
    agent = Agent(node, members, number, link, Path(local.getsockname()).parent)
    await agent.serve_clients(local)
    node.announce_agent(Path(local.getsockname()))
    log.info("%s joined the job of %s", node.host, members.present[0].host)
    following = asyncio.ensure_future(agent.follow())
    loop.add_signal_handler(signal.SIGTERM, loop.call_later, patience, following.cancel)
    loop.add_signal_handler(signal.SIGINT, following.cancel)
    try:
        return 0 if await following else LOST
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    finally:
        await agent.close()


def _certificate(options: Namespace) -> Certificate | None:
    """None where nothing is to be encrypted."""
    return read_certificate(options.certificate) if options.certificate else None


def _log_to_stderr() -> None:
    logging.basicConfig(format="carme-agent: %(message)s", level=logging.INFO, stream=sys.stderr)
