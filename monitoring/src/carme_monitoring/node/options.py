"""Options that the programs of a node share."""

import argparse
from pathlib import Path

__all__ = ["add_cgroups"]


def add_cgroups(parser: argparse.ArgumentParser) -> None:
    """`--cgroups`, as `cgroups`."""
    parser.add_argument(
        "--cgroups", type=Path, default=Path("/sys/fs/cgroup"), metavar="FOLDER",
        help="where control groups are mounted (default: %(default)s)",
    )  # fmt: skip
