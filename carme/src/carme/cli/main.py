"""`carme`: how its commands are run, and how errors are told."""

from __future__ import annotations

import os
import sys

from carme.cli.parsing import parser
from carme.errors import CarmeError
from carme.translation import follow, language_of_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

OK, FAILED, USAGE = 0, 1, 2

# These must be quick, and say all of their command line themselves: nothing else is imported or built.
ALONE = ("data",)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0: done, 1: refused or failed, 2: wrong usage."""
    follow(language_of_terminal)
    options = _options(sys.argv[1:] if arguments is None else arguments)
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
        # To take the interpreter apart takes as long as to look at a thousand files.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            code = FAILED
        except OSError as error:
            print(f"carme: What was done cannot be printed: {error.strerror}.", file=sys.stderr)
            code = FAILED
        os._exit(code)
    sys.exit(code)


def _options(arguments: list[str]) -> Any:
    """What was asked for; a shell that completes a command line gets the words instead, and we end."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser())
    return parser(arguments[0] if arguments and arguments[0] in ALONE else "").parse_args(arguments)
