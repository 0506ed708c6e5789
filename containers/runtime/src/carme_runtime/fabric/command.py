"""The command `carme-agent`.

A session's user waits for the job's command. So it is started as soon as all is there that it can ask for:
sockets that listen, and what names them. Who connects to them waits until the rest of the agent (asyncio,
TLS) is imported, which begins with the first who connects, or when the command's own start is over.
"""

import argparse
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from carme_runtime import __version__
from carme_runtime.addresses import is_loopback
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import local_socket, mpi
from carme_runtime.fabric.child import Child
from carme_runtime.key import read_key, read_private

QUIET_SECONDS = 3.0  # in which a command starts undisturbed, unless somebody asks for the agent
STOP_SECONDS = 5.0  # for a command whose agent cannot go on, between SIGTERM and SIGKILL


def main() -> None:
    """Run one node's agent; see `carme-agent --help`."""
    options = _parse(sys.argv[1:])
    try:
        _check(options)
        code = _join(options) if options.join else _serve_first(options)
    except CarmeRuntimeError as error:
        print(f"carme-agent: {error}", file=sys.stderr)
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
        help="without --certificate, use a network all the same: anyone who can record it sees the ranks' "
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
    first = (options.nodes, options.announce, options.listen, options.command)
    if options.join and any((*first, options.environment_file)):
        parser.error("--join goes with --key-file, --certificate and --socket only")
    if not options.join and not (all(first) and options.nodes > 0):
        parser.error("give --nodes, --announce, --listen and a COMMAND after --, or --join")
    return options


def _check(options: argparse.Namespace) -> None:
    """Refuse files and addresses that cannot be right, before anything is started."""
    read_key(options.key_file)
    host = options.listen or ""
    if options.join:
        host, _, port = options.join.rpartition(":")
        if not host or not port.isdecimal():
            raise CarmeRuntimeError(
                f"'{options.join}' is not a HOST:PORT.", "Give --join what the first agent announced."
            )
    if options.certificate:
        read_private(options.certificate, "certificate", "Name the file with the job's certificate.")
    elif not options.unencrypted and not is_loopback(host.strip("[]")):
        raise CarmeRuntimeError(
            f"Without --certificate, what the job's nodes say to each other at {host} could be read "
            "on the way.",
            "Give --certificate the job's certificate, or --unencrypted where everybody there is trusted.",
        )


def _join(options: argparse.Namespace) -> int:
    from carme_runtime.fabric import service

    return service.join(options)


def _serve_first(options: argparse.Namespace) -> int:
    environment = mpi.without_container(os.environ)
    if options.environment_file:
        environment |= _read_environment(options.environment_file)
    sockets: list[Path] = []
    try:
        with (
            _listen(options.listen) as network,
            local_socket.listen(options.socket or local_socket.default_path(os.environ)) as local,
        ):
            sockets.append(Path(local.getsockname()))
            environment["CARME_AGENT"] = str(sockets[0])
            environment |= mpi.session_variables(sockets[0].parent, options.listen, environment)
            for path in options.announce:
                sockets.append(path)
                _announce(path, {"host": options.listen, "port": network.getsockname()[1]})
            return _run_command(options, environment, network, local)
    finally:
        _remove(sockets)


def _run_command(
    options: argparse.Namespace, environment: dict[str, str], network: socket.socket, local: socket.socket
) -> int:
    with _Bell() as bell:
        try:
            command = Child(options.command, environment)
        except OSError as error:
            raise CarmeRuntimeError(
                f"The command {options.command[0]} cannot be started: {error.strerror}.",
                "See whether the job's image has it.",
            ) from None
        bell.wait(command, [network, local], QUIET_SECONDS)
    if command.has_ended():
        return command.wait()
    try:
        from carme_runtime.fabric import service

        return service.serve(options, command, environment, network, local)
    except BaseException:
        command.send(signal.SIGTERM)
        with _Bell() as bell:
            bell.wait(command, [], STOP_SECONDS)
        command.send(signal.SIGKILL)
        command.wait()
        raise


class _Bell:
    """Wakes this process, which has no event loop yet, when its child has ended."""

    def __enter__(self) -> "_Bell":
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._receiver)
        os.close(self._sender)

    def wait(self, child: Child, listening: list[socket.socket], seconds: float) -> None:
        """Return when the child has ended, somebody connects, or the time is over."""
        end = time.monotonic() + seconds
        while not child.has_ended() and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([*listening, self._receiver], [], [], left)
            if any(each in ready for each in listening):
                return
            if ready:
                os.read(self._receiver, 1024)


def _listen(host: str) -> socket.socket:
    """A listening socket at a free port of an address of this node."""
    try:
        family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family, backlog=128)
    except OSError as error:
        raise CarmeRuntimeError(
            f"The agent cannot listen at {host}: {error.strerror}.",
            "Give --listen an address of this node.",
        ) from None
    listener.setblocking(False)
    return listener


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
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        local_socket.make_private_directory(path.parent)
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(where, file)
        draft.replace(path)
    except OSError as error:
        raise CarmeRuntimeError(
            f"The file {path} cannot be written: {error.strerror}.", "Name another with --announce."
        ) from None


def _remove(paths: list[Path]) -> None:
    """Leave nothing behind that names an agent which is gone."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            continue


if __name__ == "__main__":
    main()
