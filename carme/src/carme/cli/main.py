"""`carme`: its commands, and how errors are told."""

import argparse
import importlib
import os
import sys
from typing import Any, NoReturn

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
    options = _parser(arguments).parse_args(arguments)
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


def program() -> NoReturn:
    """Run the command as a program: `main`, and out."""
    code = main()
    if sys.argv[1:2] and sys.argv[1] in ALONE:
        # These must be quick, and to take the interpreter apart takes as long as to look at a thousand files.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            code = FAILED
        except OSError as error:
            print(f"carme: What was done cannot be printed: {error.strerror}.", file=sys.stderr)
            code = FAILED
        os._exit(code)
    sys.exit(code)


class _Help(argparse.HelpFormatter):
    """Knows the terminal's width without the modules that the usual one imports for each parser."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    """As shutil.get_terminal_size finds them."""
    try:
        return int(os.environ["COLUMNS"]) or 80
    except (KeyError, ValueError):
        try:
            return os.get_terminal_size(1).columns or 80
        except OSError:
            return 80


class _Parser(argparse.ArgumentParser):
    """Those of the commands are of this class, too."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **given})


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    """What understands these arguments, and all others unless they begin with a command that is alone."""
    parser = _Parser(
        prog="carme",
        description="Jobs and sessions on this cluster.",
        epilog="Each command explains itself: carme submit --help",
    )
    parser.add_argument("--version", action="version", version=f"carme {__version__}")
    # Named, so that nothing is imported just to find it out.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=parser.prog)
    if arguments and arguments[0] in ALONE:
        part = importlib.import_module(f"carme.cli.{arguments[0]}")
        part.add(commands, only=arguments[1] if len(arguments) > 1 else "")
        return parser
    for part in COMMANDS:
        importlib.import_module(f"carme.cli.{part}").add(commands)
    return parser
