"""The parser of all commands."""

import argparse
import importlib
import os
from typing import Any

from carme import __version__

__all__ = ["parser"]

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


def parser(alone: str = "") -> argparse.ArgumentParser:
    """What understands all arguments; with the name of a command, those that begin with it."""
    made = _Parser(
        prog="carme",
        description="Jobs and sessions on this cluster.",
        epilog="Each command explains itself: carme submit --help",
    )
    made.add_argument("--version", action="version", version=f"carme {__version__}")
    # Named, so that nothing is imported just to find it out.
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=made.prog)
    for part in (alone,) if alone else COMMANDS:
        importlib.import_module(f"carme.cli.{part}").add(commands)
    return made
