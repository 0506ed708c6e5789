"""`carme`: its commands, and how errors are told."""

import argparse
import importlib
import os
import sys

from carme import __version__
from carme.errors import CarmeError
from carme.translation import follow, language_of_terminal

OK, FAILED, USAGE = 0, 1, 2

# Each adds its commands, which set `run`, a function of the options that returns the exit code.
COMMANDS = (
    "cluster",
    "sessions",
    "jobs",
    "report",
    "start",
    "portal",
    "personal",
    "admin",
    "images",
    "data",
    "datasets",
    "config",
    "validate",
)
# These say all of their command line themselves, so that it alone is imported: the others take their time.
ALONE = ("data",)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0: done, 1: refused or failed, 2: wrong usage."""
    follow(language_of_terminal)
    arguments = sys.argv[1:] if arguments is None else arguments
    first = arguments[0] if arguments else ""
    options = _parser((first,) if first in ALONE else COMMANDS).parse_args(arguments)
    try:
        return options.run(options)
    except CarmeError as error:
        print(f"carme: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`carme jobs | head`): nothing to complain about.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser(parts: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="carme",
        description="Jobs and sessions on this cluster.",
        epilog="Each command explains itself: carme submit --help",
    )
    parser.add_argument("--version", action="version", version=f"carme {__version__}")
    # Named, so that nothing is imported just to find it out.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=parser.prog)
    for part in parts:
        importlib.import_module(f"carme.cli.{part}").add(commands)
    return parser
