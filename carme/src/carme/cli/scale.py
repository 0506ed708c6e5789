"""`carme scale`: what the result of `carme-run --scale-probe` predicts."""

from __future__ import annotations

import argparse
from pathlib import Path

from carme.cli.output import add_json
from carme.errors import CarmeError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "scale", help="predict how training scales, from the result of carme-run --scale-probe"
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="what the probe wrote")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the curve into this file")
    parser.add_argument("--network", metavar="TEXT", help='links between nodes, such as "100 Gbit/s, 2 us"')
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, metavar="K", help="as a rule the GPUs of a node (default: 1)"
    )
    parser.add_argument("--upto", type=int, default=64, metavar="N", help="the most ranks (default: 64)")
    parser.add_argument("--batch", type=int, metavar="B", help="samples of a step, instead of the script's")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the result with this network and batch, for the portal's forms and carme submit",
    )
    add_json(parser)
    parser.set_defaults(run=_scale)


def _scale(options: argparse.Namespace) -> int:
    try:
        from carme_runtime.errors import CarmeRuntimeError
        from carme_runtime.scaling.command import show
    except ImportError:
        raise CarmeError(
            "The training runtime is not installed here.",
            "Use carme scale in a session or job, or install carme-runtime with pip.",
        ) from None
    try:
        show(options)
    except CarmeRuntimeError as error:
        raise CarmeError(error.message, error.remedy) from None
    return 0
