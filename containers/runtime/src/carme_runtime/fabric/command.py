"""The command `carme-agent`."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import ssl
import sys
import tempfile
from pathlib import Path

from carme_runtime import __version__
from carme_runtime.addresses import is_loopback
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import handshake, local_socket
from carme_runtime.fabric.agent import Agent
from carme_runtime.fabric.frames import UNKNOWN_PEER_LIMIT, FrameError, Link, LinkClosed
from carme_runtime.fabric.members import Member, Members
from carme_runtime.fabric.tls import Certificate, read_certificate
from carme_runtime.key import read_key, read_private
from carme_runtime.ranks import Node

CONNECT_SECONDS = 10.0

log = logging.getLogger("carme-agent")


def main() -> None:
    """Run one node's agent; see `carme-agent --help`."""
    logging.basicConfig(format="carme-agent: %(message)s", level=logging.INFO, stream=sys.stderr)
    options = _parse(sys.argv[1:])
    try:
        code = asyncio.run(_join(options) if options.join else _serve_first(options))
    except CarmeRuntimeError as error:
        log.error("%s", error)
        code = 1
    sys.exit(code)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="carme-agent",
        allow_abbrev=False,
        description="Join the nodes of a job, so that carme-run can start ranks on all of them.",
        usage="carme-agent --nodes N --key-file FILE --announce FILE --listen ADDRESS "
        "[--certificate FILE] [--environment-file FILE] [--socket PATH] -- COMMAND ...\n"
        "       carme-agent --key-file FILE [--certificate FILE] --join HOST:PORT [--socket PATH]",
    )
    parser.add_argument("--key-file", type=Path, required=True, help="the job's key, 0600")
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="PEM file, 0600, with the job's self-signed certificate and its private key: all that goes "
        "between nodes is then encrypted by TLS, in which both sides must show exactly this certificate",
    )
    parser.add_argument(
        "--unencrypted",
        action="store_true",
        help="without --certificate, use a network all the same: whoever can record it sees the ranks' "
        "environment and output",
    )
    parser.add_argument("--socket", type=Path, help="Unix socket for clients on this node")
    parser.add_argument("--join", metavar="HOST:PORT", help="the first node's agent")
    parser.add_argument("--nodes", type=int, help="number of nodes of the job")
    parser.add_argument(
        "--announce",
        type=Path,
        action="append",
        metavar="FILE",
        help="file to write this agent's host and port to, 0600; may be given several times",
    )
    parser.add_argument("--listen", metavar="ADDRESS", help="this node's address, as the others reach it")
    parser.add_argument("--environment-file", type=Path, help="JSON object, added to COMMAND's environment")
    parser.add_argument("--version", action="version", version=__version__)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.command = arguments[cut + 1 :]
    first = (options.nodes, options.announce, options.listen, *options.command)
    if options.join and any((*first, options.environment_file)):
        parser.error("--join goes with --key-file, --certificate and --socket only")
    if not options.join and not (all(first) and options.command and options.nodes > 0):
        parser.error("give --nodes, --announce, --listen and a COMMAND after --, or --join")
    return options


async def _serve_first(options: argparse.Namespace) -> int:
    key = read_key(options.key_file)
    certificate = _certificate(options, options.listen)
    environment = dict(os.environ)
    if options.environment_file:
        environment |= _read_environment(options.environment_file)
    node = Node(environment, options.listen, options.key_file)
    me = Member(number=0, **node.about())
    agent = Agent(node, Members.of([me], [], options.nodes), 0)
    bound = None
    try:
        try:
            port = agent.serve_network(options.listen, key, certificate)
        except OSError as error:
            raise CarmeRuntimeError(
                f"The agent cannot listen at {options.listen}: {error.strerror}.",
                "Give --listen an address of this node.",
            ) from None
        bound = await _open_socket(agent, node, options.socket)
        environment["CARME_AGENT"] = bound
        for path in options.announce:
            _announce(path, {"host": options.listen, "port": port})
        return await _run_command(options.command, environment)
    finally:
        await agent.close()
        _remove(*options.announce, bound)


async def _join(options: argparse.Namespace) -> int:
    key = read_key(options.key_file)
    host, _, port = options.join.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        raise CarmeRuntimeError(
            f"'{options.join}' is no HOST:PORT.", "Give --join what the first agent announced."
        )
    certificate = _certificate(options, host)
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
    node = Node(os.environ, link.local_address(), options.key_file)
    try:
        await asyncio.wait_for(handshake.join(link, key), CONNECT_SECONDS)
        link.send({"node": node.about()})
        number = int((await asyncio.wait_for(link.receive(), CONNECT_SECONDS))["number"])
        members = Members.from_json((await asyncio.wait_for(link.receive(), CONNECT_SECONDS))["members"])
    except handshake.WrongKey:
        raise CarmeRuntimeError(
            f"What listens at {options.join} does not hold this job's key.",
            "Give --key-file and --join of the same job.",
        ) from None
    except (FrameError, LinkClosed, KeyError, asyncio.TimeoutError):
        raise CarmeRuntimeError(
            f"The agent at {options.join} did not let this node in.", "Its log, the job's output, says why."
        ) from None
    agent = Agent(node, members, number, link)
    bound = await _open_socket(agent, node, options.socket)
    log.info("%s joined the job of %s", node.host, members.present[0].host)
    following = asyncio.ensure_future(agent.follow())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, following.cancel)
    try:
        return 0 if await following else 1
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    finally:
        await agent.close()
        _remove(bound)


def _certificate(options: argparse.Namespace, host: str) -> Certificate | None:
    """None where nothing is to be encrypted."""
    if options.certificate:
        return read_certificate(options.certificate)
    if options.unencrypted or is_loopback(host):
        return None
    raise CarmeRuntimeError(
        f"Without --certificate, what the job's nodes say to each other at {host} could be read on the way.",
        "Give --certificate the job's certificate, or --unencrypted where everybody there is trusted.",
    )


async def _open_socket(agent: Agent, node: Node, path: Path | None) -> str:
    listener = local_socket.listen(path or local_socket.default_path(os.environ))
    await agent.serve_clients(listener)
    bound = listener.getsockname()
    node.announce_agent(Path(bound))
    return bound


async def _run_command(command: list[str], environment: dict[str, str]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        raise CarmeRuntimeError(
            f"The command {command[0]} cannot be started: {error.strerror}.",
            "See whether the job's image has it.",
        ) from None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _pass_on, process, number)
    code = await process.wait()
    return code if code >= 0 else 128 - code


def _pass_on(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _read_environment(path: Path) -> dict[str, str]:
    remedy = "It must be a JSON object of strings."
    try:
        found = json.loads(read_private(path, "environment file", remedy))
    except ValueError:
        raise CarmeRuntimeError(f"The environment file {path} is not JSON.", remedy) from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CarmeRuntimeError(f"The environment file {path} holds something other than strings.", remedy)
    return found


def _announce(path: Path, where: dict[str, str | int]) -> None:
    """Write the file in one step, so that no reader sees half of it."""
    try:
        local_socket.make_private_directory(path.parent)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:  # 0600
            json.dump(where, draft)
        Path(draft.name).replace(path)
    except OSError as error:
        raise CarmeRuntimeError(
            f"The file {path} cannot be written: {error.strerror}.", "Name another with --announce."
        ) from None


def _remove(*paths: Path | str | None) -> None:
    """Leave nothing behind that names an agent which is gone."""
    for path in filter(None, paths):
        with contextlib.suppress(OSError):
            Path(path).unlink()


if __name__ == "__main__":
    main()
