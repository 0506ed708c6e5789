"""`carme`: how its commands are run, and how errors are reported."""

from __future__ import annotations

import errno
import io
import os
import sys

from carme.cli.parsing import parser
from carme.errors import CarmeError
from carme.translation import follow, language_of_terminal, message, translated

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

OK, FAILED, USAGE = 0, 1, 2

# These must be quick: they end without taking the interpreter apart.
QUICK = ("data",)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0: done, 1: refused or failed, 2: wrong usage."""
    follow(language_of_terminal)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the encoding lacks, and bytes that are not text, are shown like \\xe9.
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except CarmeError as error:
        elsewhere = _remedy_off_site(error)
        print(f"carme: {elsewhere or error}", file=sys.stderr)
        if not elsewhere and (address := _help_address(error)):
            print(translated(message("More: {address}", address=address)), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`carme jobs | head`): nothing to complain about.
        _print_nothing_more()
        return FAILED
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _is_here():
            sentence = "The folder that you are in has been removed. Go to another one with cd."
        elif error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            _print_nothing_more()
            sentence = f"The output cannot be written: {error.strerror}."
        else:
            raise
        print(f"carme: {sentence}", file=sys.stderr)
        return FAILED


def _remedy_off_site(error: CarmeError) -> str:
    """What to say instead, where nobody is to write a site's configuration: on a computer of a user's own."""
    if error.code != "no-config" or os.environ.get("CARME_CONFIG") or "config" in sys.argv[1:2]:
        return ""
    return (
        "This command works on the computers of the cluster only, and this one is none of them. "
        "Sign in on one of them. From here, through the portal: carme status, submit, jobs, logs, cancel, "
        "extend, sessions, bookings, files, images, presets, projects, notices, after: carme login https://PORTAL"
    )


def _help_address(error: CarmeError) -> str:
    """The address of the page that says more of an error; empty where none does, or no portal is known."""
    path = error.help
    if not path.startswith("/"):
        return path
    try:
        from carme.config import load

        portal = load().site.url
    except (CarmeError, ImportError):  # on a computer of the user's own, or in a container
        try:
            from carme.client import Login

            portal, _token = Login().read()
        except (CarmeError, ImportError):
            return ""
    return f"{portal.rstrip('/')}{path}"


def _run(arguments: list[str]) -> int:
    try:
        options = _options(arguments)
        return options.run(options)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where somebody says that it cannot be written


def _print_nothing_more() -> None:
    """Have Python not try once more, when it ends, to print what could not be printed."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_here() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib takes long to import
    except FileNotFoundError:
        return False
    return True


def program() -> NoReturn:
    """Run the command as a program: `main`, and out."""
    code = main()
    if sys.argv[1:2] and sys.argv[1] in QUICK:
        # To take the interpreter apart takes as long as to look at a thousand files.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            code = FAILED
        except OSError as error:
            print(f"carme: The output cannot be written: {error.strerror}.", file=sys.stderr)
            code = FAILED
        os._exit(code)
    sys.exit(code)


def _options(arguments: list[str]) -> Any:
    """What was requested; a shell that completes a command line gets the words instead, and we end."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser(_completed_command()))
    return parser(arguments[0] if arguments else "").parse_args(arguments)


def _completed_command() -> str:
    """The command whose words a shell completes; empty while its name may not be whole."""
    line = os.environ.get("COMP_LINE", "")
    words = f"{line[: int(os.environ.get('COMP_POINT', len(line)))]}|".split()  # behind a space one word more
    return words[1] if len(words) > 2 else ""
