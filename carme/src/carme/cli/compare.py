"""`carme compare`: the same training work in every framework that is installed."""

from __future__ import annotations

import argparse
from pathlib import Path

from carme.cli.output import add_json
from carme.errors import CarmeError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; its options are those of `python -m carme_runtime.compare`."""
    parser = commands.add_parser(
        "compare", help="measure the same training in every framework that is installed, and write a report"
    )
    parser.add_argument("contestants", nargs="*", metavar="CONTESTANT", help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="show contestants and networks; measure nothing")
    parser.add_argument("--quick", action="store_true", help="small networks and few rounds: some minutes")
    parser.add_argument("--networks", metavar="NAMES", help="with commas; see --list")
    parser.add_argument("--ranks", default="1,2", metavar="NUMBERS", help="with commas (default: 1,2)")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each (default: 10)")
    parser.add_argument("--batch", type=int, metavar="B", help="samples of a step, instead of the network's")
    parser.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        default="strong",
        help="all ranks share the batch, or each has one of that size (default: strong)",
    )
    parser.add_argument("--threads", type=int, metavar="T", help="of each rank (default: all cores, divided)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of weights, batches and orders")
    parser.add_argument(
        "--slower",
        action="append",
        default=[],
        metavar="NAME=PERCENT",
        help="make a contestant slower on purpose, to see that it is found",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("compare"),
        metavar="FOLDER",
        help="where compare.json and compare.html go, and what all nodes see (default: compare)",
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        type=Path,
        metavar=("BEFORE.json", "AFTER.json"),
        help="show how two results differ; measure nothing",
    )
    add_json(parser)
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    try:
        from carme_runtime.compare.command import run
        from carme_runtime.errors import CarmeRuntimeError
    except ImportError:
        raise CarmeError(
            "The training runtime is not installed here.",
            "Use carme compare in a session or job, or install carme-runtime with pip.",
        ) from None
    try:
        run(options)
    except CarmeRuntimeError as error:
        raise CarmeError(error.message, error.remedy) from None
    return 0
