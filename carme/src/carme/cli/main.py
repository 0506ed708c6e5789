"""`carme`: its commands, and how errors are told."""

import argparse
import os
import sys

from carme import __version__
from carme.cli import cluster, config, jobs, report, sessions, start, validate
from carme.errors import CarmeError

OK, FAILED, USAGE = 0, 1, 2

# Each adds its commands, which set `run`, a function of the options that returns the exit code.
COMMANDS = (
    cluster,
    sessions,
    jobs,
    report,
    start,
    config,
    validate,
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0: done, 1: refused or failed, 2: wrong usage."""
    options = _parser().parse_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="carme",
        description="Jobs and sessions on this cluster.",
        epilog="Each command explains itself: carme submit --help",
    )
    parser.add_argument("--version", action="version", version=f"carme {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for part in COMMANDS:
        part.add(commands)
    return parser
