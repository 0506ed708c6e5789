"""What the command lines of this package share: how a subcommand is added, and how a command ends."""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.options import add_json

__all__ = ["add_subcommand", "exit_code"]


def add_subcommand(commands: Any, name: str, run: Callable[[argparse.Namespace], Any], summary: str) -> Any:
    """Add a subcommand with `--json` to the result of `add_subparsers`; its parser has `run` as a default."""
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.set_defaults(run=run)
    add_json(command)
    return command


def exit_code(program: str, run: Callable[[], int | None]) -> int:
    """Run a command, and say on standard error why it failed.

    Returns:
        What `run` returns (None: 0), 1 after an error of this package, or 128 and the signal after Ctrl-C or
        where nobody reads the output any more.
    """
    try:
        return run() or 0
    except CarmeRuntimeError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
