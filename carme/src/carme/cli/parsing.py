"""The parser of all commands."""

import argparse
import importlib
import os
import re
from collections.abc import Sequence
from typing import Any

from carme import __version__

__all__ = ["parser", "pass_on", "take_program"]

# Each part with the commands that it adds, which set `run`, a function of the options that returns the exit
# code. To import all parts takes many times as long as the one that a command line needs.
COMMANDS = {
    "cluster": ("status", "accounts"),
    "sessions": ("session", "sessions"),
    "jobs": ("jobs", "cancel", "extend", "logs"),
    "report": ("report",),
    "runtime": ("scale", "compare"),
    "net": ("net", "onnx"),
    "start": ("submit",),
    "portal": ("login", "bookings"),
    "personal": ("files", "presets", "notices", "projects"),
    "admin": ("admin",),
    "images": ("images",),
    "data": ("data",),
    "datasets": ("datasets",),
    "config": ("config",),
    "validate": ("validate",),
}


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
        #: What follows the options: `script` or `command`; empty: this one starts no program.
        self.program = ""
        #: Whether everything that follows, options as well, is understood by somebody else.
        self.passes_on = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As argparse does; where a program is started, options may also come after its name.

        None that might be meant for the program is taken for it in silence, and none of ours is given to it:
        what the program is to get stands after `--`.
        """
        if self.passes_on:
            found, _ = super().parse_known_args([], namespace)
            found.words = list(args)
            return found, []
        if not self.program:
            return super().parse_known_args(args, namespace)
        words = list(args)
        own, rest = words, None
        if "--" in words:
            own, rest = words[: words.index("--")], words[words.index("--") + 1 :]
        found, remaining = super().parse_known_args(own, namespace)
        unknown = next((number for number, word in enumerate(remaining) if _is_option(word)), None)
        if unknown is not None:
            named = [getattr(found, action.dest) for action in self._actions if not action.option_strings]
            self._refuse(named, remaining, unknown, rest)
        found.command = ["--", *rest] if rest is not None and not remaining else [*remaining, *(rest or ())]
        return found, []

    def _refuse(
        self, named: Sequence[str], remaining: Sequence[str], unknown: int, rest: Sequence[str] | None
    ) -> None:
        import shlex

        sentence = f"there is no option {remaining[unknown].partition('=')[0]}"
        if unknown:  # behind a script, or a command
            line = shlex.join([*named, *remaining[:unknown], "--", *remaining[unknown:], *(rest or ())])
            self.error(f"{sentence}. What the {self.program} is to get stands after --: {self.prog} {line}")
        from carme.wording import nearest

        known = (name for action in self._actions for name in action.option_strings if name != "-h")
        self.error(f"{sentence}. {nearest(remaining[unknown], known)}")


def take_program(parser: argparse.ArgumentParser, what: str) -> None:
    """Let a command end with a program: `options.command` has its words, with `--` in front if it begins so.

    Args:
        parser: Of the command, one of `parser()`.
        what: What it mostly is, `script` or `command`.
    """
    assert isinstance(parser, _Parser)
    parser.program, parser.allow_abbrev = what, False


def pass_on(parser: argparse.ArgumentParser) -> None:
    """Let a command have `options.words`, whatever they are, for a program that has its own options.

    Args:
        parser: Of the command, one of `parser()`.
    """
    assert isinstance(parser, _Parser)
    parser.passes_on = True


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not re.fullmatch(r"-\d+(\.\d*)?|-\.\d+", word)


def parser(command: str = "") -> argparse.ArgumentParser:
    """What understands all arguments; with the name of a command, those that begin with it or one beside it.

    Args:
        command: The first argument. Where it is no command, all are understood.
    """
    root = _Parser(
        prog="carme",
        description="Start jobs and notebooks on a Slurm cluster, see what they use, book nodes, copy data.",
        epilog="Every command has its own help: carme submit --help",
    )
    root.add_argument("--version", action="version", version=f"carme {__version__}")
    # Named, so that nothing is imported just to find it out.
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=root.prog)
    for part in [part for part, added in COMMANDS.items() if command in added] or COMMANDS:
        importlib.import_module(f"carme.cli.{part}").add(commands)
    return root
