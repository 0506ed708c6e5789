"""The command `carme-run`."""

import argparse
import asyncio
import contextlib
import importlib.machinery
import os
import shutil
import signal
import sys
from pathlib import Path

from carme_runtime import __version__
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import Fabric, connect
from carme_runtime.launcher.placement import place
from carme_runtime.launcher.run import Run

JOIN_SECONDS = 60.0  # how long the nodes of a job may take to come up
OPTIONS_WITH_VALUE = ("-n", "--nodes", "--devices-per-node")
NOT_STARTED = 2


def main() -> None:
    """Start a run and stay until it ends; see `carme-run --help`."""
    try:
        code = asyncio.run(_run(sys.argv[1:]))
    except CarmeRuntimeError as error:
        print(f"carme-run: {error}", file=sys.stderr)
        code = NOT_STARTED
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


async def _run(arguments: list[str]) -> int:
    options, command = _parse(arguments)
    fabric = await connect(os.environ)
    try:
        await _wait_for_nodes(fabric, options.nodes)
        places = place(
            fabric.members, ranks=options.n, nodes=options.nodes, per_node=options.devices_per_node
        )
        return await Run(fabric, places, command, str(Path.cwd()), os.environ).execute()
    finally:
        await fabric.close()


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="carme-run",
        allow_abbrev=False,
        description="Start a program once per GPU on all nodes of this job, as torchrun does on one; "
        "outside of jobs, on this host.",
        usage="carme-run [options] script.py [argument ...]\n"
        "       carme-run [options] -m module [argument ...]\n"
        "       carme-run [options] -- program [argument ...]",
    )
    parser.add_argument("-n", type=_count, metavar="N", help="ranks in all (default: as many as fit)")
    parser.add_argument("--nodes", type=_count, metavar="M", help="use the first M nodes (default: all)")
    parser.add_argument(
        "--devices-per-node",
        type=_count,
        metavar="K",
        help="ranks per node (default: one per GPU of the job there, or one where there is none)",
    )
    parser.add_argument("--version", action="version", version=__version__)
    own = _own_options(arguments)
    options = parser.parse_args(arguments[:own])
    if own == len(arguments):
        parser.error("Nothing to run was named. Give a script: carme-run train.py")
    return options, _command(arguments[own], arguments[own + 1 :])


def _own_options(arguments: list[str]) -> int:
    """How many of the arguments are carme-run's own: what follows belongs to the program."""
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument in ("-m", "--") or not argument.startswith("-"):
            return index
        index += 2 if argument in OPTIONS_WITH_VALUE else 1
    return len(arguments)


def _command(first: str, rest: list[str]) -> list[str]:
    if first == "--":
        if not rest:
            raise CarmeRuntimeError("No program follows --.", "Give one: carme-run -- program argument ...")
        program = shutil.which(rest[0])
        if not program:
            raise CarmeRuntimeError(
                f"There is no program '{rest[0]}' that can be executed.", "Check its name, its mode and PATH."
            )
        return [str(Path(program).absolute()), *rest[1:]]
    if first == "-m":
        if not rest:
            raise CarmeRuntimeError("No module follows -m.", "Give one: carme-run -m package.module")
        _check_module(rest[0])
        return [sys.executable, "-m", *rest]
    _check_script(first)
    return [sys.executable, first, *rest]


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise CarmeRuntimeError(f"'{script}' is a folder, not a script.", "Name a Python file in it.")
    if not path.exists():
        raise CarmeRuntimeError(
            f"There is no script '{script}' in {Path.cwd()}." if not path.is_absolute()
            else f"There is no script '{script}'.",
            "Check the name and the folder.",
        )  # fmt: skip
    if not os.access(path, os.R_OK):
        raise CarmeRuntimeError(f"The script '{script}' may not be read by you.", f"Use: chmod u+r {script}")


def _check_module(module: str) -> None:
    package = module.partition(".")[0]
    finder = importlib.machinery.PathFinder
    if package not in sys.builtin_module_names and not finder.find_spec(
        package, [str(Path.cwd()), *sys.path]
    ):
        raise CarmeRuntimeError(
            f"There is no module '{package}' for {sys.executable}.",
            "Install it, or go to the folder that has it.",
        )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of 1 or more.")
    return int(text)


async def _wait_for_nodes(fabric: Fabric, nodes: int | None) -> None:
    """Wait for the nodes that the run needs: when a job has just begun, they may still come up."""
    members = fabric.members
    if nodes and nodes > members.expected:
        if not fabric.in_job:
            raise CarmeRuntimeError(
                f"--nodes {nodes} was asked for outside of a job, where there is this host alone.",
                "Start a job with so many nodes and use carme-run there, or leave --nodes out.",
            )
        raise CarmeRuntimeError(
            f"--nodes {nodes} was asked for, but the job has {members.expected}.",
            f"Use --nodes {members.expected} or less, or start a job with more nodes.",
        )
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_until_there(fabric, nodes), JOIN_SECONDS)
    members = fabric.members
    missing = (nodes or members.expected) - len(members.present)
    if missing > 0:
        here = ", ".join(member.host for member in members.present)
        lost = f"; lost: {', '.join(members.lost)}" if members.lost else ""
        raise CarmeRuntimeError(
            f"{missing} of the job's {members.expected} nodes cannot be reached (here: {here}{lost}).",
            f"Use --nodes {len(members.present)} to run on those that are here, or start a new job.",
        )


async def _until_there(fabric: Fabric, nodes: int | None) -> None:
    while len(fabric.members.present) < (nodes or fabric.members.expected - len(fabric.members.lost)):
        if len(fabric.members.present) + len(fabric.members.lost) >= fabric.members.expected:
            return
        if (await fabric.next_event()).gone:
            raise CarmeRuntimeError("The job's agent on this node was lost.", "Start a new job.")


if __name__ == "__main__":
    main()
