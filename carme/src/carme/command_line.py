"""Options that several commands have, each declared once, and how a command that failed says so."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from carme.errors import CarmeError

__all__ = [
    "Options",
    "add_account",
    "add_certificate",
    "add_config",
    "add_data",
    "add_image",
    "add_json",
    "add_partition",
    "add_qos",
    "add_reservation",
    "add_share",
    "add_size",
    "add_start",
    "add_time",
    "add_title",
    "add_workers",
    "run_command",
]

#: A parser, or a group of its options.
Options = argparse._ActionsContainer


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run a command; its exit code, and 1 with the error on stderr if it fails.

    Args:
        program: Its name, which stands before the error.
        command: What it does.
    """
    try:
        return command()
    except CarmeError as error:
        print(f"{program}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{program}: {error.filename}: {error.strerror}.", file=sys.stderr)
    return 1


def add_config(parser: Options, default: Path | None = None) -> None:
    """`--config`, for programs of services; `default`: for those that need the file's path itself."""
    usual = default or "$CARME_CONFIG, else /etc/carme/carme.toml"
    parser.add_argument(
        "--config", type=Path, default=default, metavar="FILE", help=f"site configuration (default: {usual})"
    )


def add_json(parser: Options) -> None:
    """`--json`, which every command has that prints what it has found or done."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def add_image(parser: Options, help: str, *, required: bool = False) -> None:
    """`--image`: what a job or a session runs in."""
    parser.add_argument("--image", required=required, help=help)


def add_data(parser: Options, what: str) -> None:
    """`--stage` and `--results`: data before it begins and results after it.

    Args:
        what: What begins: the job, the session, the booking.
    """
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="[TARGET:]WHAT",
        help=f"copy a dataset, or a folder by its absolute path, before {what} begins: to 'local' (default), "
        "'scratch', 'ram' or 'beeond'; it is in $CARME_DATA then; may be repeated",
    )
    parser.add_argument(
        "--results",
        metavar="FOLDER",
        help="copy what the job leaves in $CARME_RESULTS to this folder, even if it fails",
    )


def add_size(parser: Options, *, required: bool = False) -> None:
    """Nodes and GPUs, and the partition that they are in.

    Args:
        required: Whether GPUs and partition must be given, as for a booking.
    """
    parser.add_argument(
        "--gpus",
        type=int,
        default=0,
        required=required,
        help="GPUs on each node" if required else "GPUs on each node (default: 0)",
    )
    parser.add_argument("--gpu-type", required=required, help="type of the GPUs")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    add_partition(parser, "partition" if required else "partition (default: the site's)", required=required)


def add_share(parser: Options) -> None:
    """`--cpus` and `--memory`: what it needs of each node besides the share of the GPUs."""
    parser.add_argument("--cpus", type=int, help="processors on each node (default: the share of the GPUs)")
    parser.add_argument("--memory", type=int, metavar="MIB", help="memory on each node, in MiB")


def add_partition(parser: Options, help: str, *, required: bool = False) -> None:
    """`--partition`."""
    parser.add_argument("--partition", required=required, help=help)


def add_account(parser: Options, help: str) -> None:
    """`--account`: Slurm's, which pays."""
    parser.add_argument("--account", help=help)


def add_qos(parser: Options) -> None:
    """`--qos`."""
    parser.add_argument("--qos", help="Slurm's quality of service (default: the account's)")


def add_reservation(parser: Options) -> None:
    """`--reservation`."""
    parser.add_argument("--reservation", metavar="NAME", help="booking to run in (default: none)")


def add_time(parser: Options, what: str = "how long", *, required: bool = False) -> None:
    """`--time`, which `carme.jobs.parse_minutes` reads; by default the site's, unless it must be given."""
    default = "" if required else " (default: the site's)"
    parser.add_argument("--time", required=required, help=f"{what}: 90 (minutes), 2h, 1:30:00{default}")


def add_title(parser: Options) -> None:
    """`--title`, of what is started or made."""
    parser.add_argument("--title", default="", help="a title")


def add_start(parser: Options) -> None:
    """`--start`: a moment, in the user's time zone."""
    parser.add_argument(
        "--start", required=True, metavar="TIME", help="like 2026-11-30T09:00, in your time zone"
    )


def add_certificate(parser: Options) -> None:
    """`--certificate`, for a site whose own is not signed by a public authority."""
    parser.add_argument(
        "--certificate", metavar="PEM", help="certificate to trust, when no public authority signed it"
    )


def add_workers(parser: Options) -> None:
    """`--workers`: processes of this host."""
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: by cores)")
