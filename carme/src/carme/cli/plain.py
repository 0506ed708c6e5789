"""Plain command lines, without argparse: to import it takes as long as to look at thousands of files.

What options there are is declared once, by calls that argparse knows. Here the same calls are noted, and a
command line is taken word by word. Whatever is not plain (help, abbreviations, mistakes) is left to argparse,
which has the words for it.
"""

from __future__ import annotations

from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Plain"]


class Plain:
    """Stands where a parser of argparse is given its declarations, and notes those of one command."""

    prog = ""

    def __init__(self) -> None:
        self._commands: list[str] = []
        self._values: dict[str, Any] = {}
        self._arguments: list[str] = []
        self._options: dict[str, dict[str, Any]] = {}
        self._understood = True

    def add_subparsers(self, **_about: Any) -> Plain:
        """What the commands are added to."""
        return self

    def add_parser(self, name: str, **_about: Any) -> Plain:
        """A command."""
        self._commands.append(name)
        return self

    def add_argument_group(self, *_about: Any) -> Plain:
        """What options are added to."""
        return self

    def set_defaults(self, **values: Any) -> None:
        """What holds whatever is said."""
        self._values.update(values)

    def add_argument(self, name: str, **declared: Any) -> None:
        """An argument or an option."""
        if not name.startswith("-"):
            self._arguments.append(name)
            self._understood = self._understood and declared.keys() <= {"metavar", "help"}
            return
        known = {"action", "type", "default", "choices", "metavar", "help"}
        simple = declared.keys() <= known and declared.get("action") in (None, "store_true")
        self._understood = self._understood and simple
        self._options[name] = declared
        off = False if "action" in declared else None
        self._values[_key(name)] = declared.get("default", off)

    def parse(self, words: list[str]) -> SimpleNamespace | None:
        """What argparse would make of these words; None: it has to be asked."""
        begun = len(self._commands)
        if not self._understood or words[:begun] != self._commands:
            return None
        values, given = dict(self._values), []
        rest = iter(words[begun:])
        for word in rest:
            if not word.startswith("-"):
                given.append(word)
            elif (declared := self._options.get(word)) is None:
                return None
            elif "action" in declared:
                values[_key(word)] = True
            else:
                said = next(rest, "-")
                if said.startswith("-") or said not in declared.get("choices", (said,)):
                    return None
                try:
                    values[_key(word)] = declared.get("type", str)(said)
                except ValueError:
                    return None
        if len(given) != len(self._arguments):
            return None
        return SimpleNamespace(**values, **dict(zip(self._arguments, given, strict=True)))


def _key(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
