"""The options of `carme compare` and `carme scale`, each in one list, and what all commands have.

Carme's own command line adds them to its parser, for which it must not import what these commands need.
"""

import argparse
from pathlib import Path

__all__ = ["USUAL_EFFICIENCY", "USUAL_NETWORKS", "add_compare_options", "add_json", "add_scale_options"]

#: What `carme compare` trains where nobody chooses; see `carme_runtime.compare.networks`.
USUAL_NETWORKS = ("mlp", "alexnet", "resnet20", "transformer")
#: In percent, what `carme scale` says the most ranks for where nobody chooses.
USUAL_EFFICIENCY = 70.0


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add those of `carme compare` to a parser."""
    parser.add_argument(
        "contestants", nargs="*", metavar="CONTESTANT", help="what to measure (default: all; see --list)"
    )
    parser.add_argument("--list", action="store_true", help="show contestants and networks; measure nothing")
    parser.add_argument("--quick", action="store_true", help="small networks and few rounds: some minutes")
    _add_work_options(parser)
    parser.add_argument(
        "--ranks", default="1,2", metavar="NUMBERS", help="how many ranks: numbers with commas (default: 1,2)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of measurements (default: 10)")
    parser.add_argument(
        "--batch", type=int, metavar="B", help="samples per step, instead of the network's own number"
    )
    parser.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        default="strong",
        help="all ranks share the batch, or each has one of that size (default: strong)",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        default="float32",
        help="precision of the computation; bf16 is each framework's mixed precision (default: float32)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="T", help="threads of each rank (default: its share of the cores)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="S", help="seed of weights, batches and orders (default: 1)"
    )
    _add_trust_options(parser)
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the Python that a contestant runs with, where it needs an environment of its own",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("compare"),
        metavar="FOLDER",
        help="folder for compare.json and compare.html, which all nodes must see (default: compare)",
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        type=Path,
        metavar=("BEFORE.json", "AFTER.json"),
        help="show how two results differ; measure nothing",
    )
    add_json(parser)


def _add_trust_options(parser: argparse.ArgumentParser) -> None:
    """How well medians must be known, and what proves that differences are found."""
    parser.add_argument(
        "--limit",
        type=float,
        default=3.0,
        metavar="PERCENT",
        help="largest half width of a median's 95 %% interval. Rows beyond it get up to as many rounds "
        "again, then more for --minutes, and are marked if that does not help. 0: no limit (default: 3)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="time for more rounds of rows beyond --limit, per network (default: 3; with --quick 0)",
    )
    parser.add_argument(
        "--slower",
        action="append",
        default=[],
        metavar="NAME=PERCENT",
        help="slow a contestant down, to test that the comparison detects it",
    )


def _add_work_options(parser: argparse.ArgumentParser) -> None:
    """Networks, and the images that they are trained with."""
    parser.add_argument(
        "--networks",
        metavar="NAMES",
        help=f"networks to train: names with commas, or all (default: {','.join(USUAL_NETWORKS)})",
    )
    parser.add_argument(
        "--data",
        default="digits",
        metavar="NAME",
        help="training data: digits, faces, or imagenet for images of its shape (default: digits)",
    )
    parser.add_argument(
        "--size", type=int, metavar="PIXELS", help="side of the images (default: the data's own)"
    )
    parser.add_argument("--width", type=float, metavar="FACTOR", help="factor for the number of channels")
    parser.add_argument(
        "--input",
        choices=("memory", "warm", "cold"),
        default="memory",
        help="source of the batches: memory, or a file in --output that is in the page cache (warm) or read "
        "from the disk (cold) (default: memory)",
    )


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    """Add those of `carme scale` to a parser."""
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="result of carme-run --scale-probe")
    add_json(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the curve into this file")
    parser.add_argument(
        "--network", metavar="TEXT", help='predict for these links between nodes, such as "100 Gbit/s, 2 us"'
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="K",
        help="ranks on each node, usually one per GPU (default: 1)",
    )
    parser.add_argument(
        "--upto", type=int, default=64, metavar="N", help="the largest number of ranks (default: 64)"
    )
    parser.add_argument(
        "--batch", type=int, metavar="B", help="samples per step, instead of the script's own number"
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=USUAL_EFFICIENCY,
        metavar="PERCENT",
        help="show how many ranks keep at least this much of the ideal speed-up "
        f"(default: {USUAL_EFFICIENCY:.0f})",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the result with this network and batch, for the portal's forms and carme submit",
    )
