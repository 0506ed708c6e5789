"""The manual pages of `carme`, made from what its commands say of themselves.

`python -I -m carme.cli.manual FOLDER` writes `carme.1` and a page for each command, like `carme-submit.1`.
More programs are named like `carme_runtime.launcher.command:parser`, by what makes their parsers.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from carme.cli.parsing import parser

__all__ = ["main", "pages"]


def pages(command_parser: argparse.ArgumentParser) -> dict[str, str]:
    """The manual pages of a program, for `man`; by their names, without `.1`.

    Args:
        command_parser: What understands its arguments.
    """
    name = command_parser.prog.replace(" ", "-")
    found = {name: _page(name, command_parser, command_parser.description or "", deep=False)}
    for words, command, about in _commands(command_parser):
        name = f"{command_parser.prog}-{words[0]}"
        found[name] = _page(name, command, about, deep=True)
        for alias in words[1:]:
            found[f"{command_parser.prog}-{alias}"] = f".so man1/{name}.1\n"
    return found


def _page(name: str, command_parser: argparse.ArgumentParser, about: str, deep: bool) -> str:
    about = about or command_parser.description or ""
    lines = [f".TH {_quoted(name.upper())} 1 {_quoted('')} {_quoted('Carme')}", ".SH NAME"]
    lines += [rf"{_text(name)} \- {_text(about.rstrip('.'))}", ".SH SYNOPSIS", *_synopsis(command_parser)]
    if command_parser.description and command_parser.description != about:
        lines += [".SH DESCRIPTION", _text(command_parser.description)]
    lines += _arguments(command_parser)
    commands = list(_commands(command_parser))
    if commands:
        lines += [".SH COMMANDS"]
    for words, command, reported in commands:
        if deep:
            lines += [f".SS {_quoted(command.prog)}", _text(_sentence(reported)), *_synopsis(command)]
            lines += _arguments(command, heading=False)
        else:
            lines += [".TP", rf"\fB{_text(', '.join(words))}\fR", f"{_text(_sentence(reported))}"]
            lines += [rf"See \fB{_text(f'{command_parser.prog}-{words[0]}')}\fR(1)."]
    if command_parser.epilog:
        lines += [".SH NOTES", *_verbatim(command_parser.epilog)]
    if deep:
        lines += [".SH SEE ALSO", rf"\fB{_text(name.partition('-')[0])}\fR(1)"]
    return "\n".join(line for line in lines if line) + "\n"


def _commands(
    command_parser: argparse.ArgumentParser,
) -> Iterator[tuple[list[str], argparse.ArgumentParser, str]]:
    """Each command's name and other names, its parser, and its summary."""
    for action in command_parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            reported = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in dict(action.choices).items():
                if name in reported:
                    aliases = [
                        each for each, same in action.choices.items() if same is command and each != name
                    ]
                    yield [name, *aliases], command, reported[name]


def _synopsis(command_parser: argparse.ArgumentParser) -> list[str]:
    return _verbatim(command_parser.format_usage().partition(" ")[2])


def _arguments(command_parser: argparse.ArgumentParser, heading: bool = True) -> list[str]:
    formatter = command_parser._get_formatter()
    lines = []
    for action in command_parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        invocation = formatter._format_action_invocation(action)
        reported = formatter._expand_help(action) if action.help else ""
        lines += [".TP", rf"\fB{_text(invocation)}\fR", _text(_sentence(reported))]
    return [".SH OPTIONS", *lines] if heading and lines else lines


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", ")", "?")) else f"{text}."


def _verbatim(text: str) -> list[str]:
    """Lines that stay as they are."""
    return [".nf", *(_text(line) or r"\&" for line in text.strip("\n").split("\n")), ".fi"]


def _text(text: str) -> str:
    r"""Without what means something to troff; `-` is that of command lines, so that it can be copied."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def _quoted(text: str) -> str:
    return '"' + _text(text).replace('"', r"\(dq") + '"'


def main() -> None:
    """Write the pages of `carme`, or of the programs named, into a folder."""
    os.environ["COLUMNS"] = "80"
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    makers = [parser]
    for name in sys.argv[2:]:
        module, _, function = name.partition(":")
        makers.append(getattr(importlib.import_module(module), function))
    for make in makers:
        for name, page in pages(make()).items():
            path = folder / f"{name}.1"
            path.write_text(page, encoding="utf-8")
            path.chmod(0o644)


if __name__ == "__main__":
    main()
