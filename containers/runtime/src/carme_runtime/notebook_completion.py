"""Completion of the magics' options, in IPython and, through its kernel, in JupyterLab."""

import argparse
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["install"]


def install(shell: Any, stage_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Have a shell complete the options of the magics.

    Args:
        shell: IPython's.
        stage_parser: Makes what understands the line of `%carme_stage`.
    """
    parsers: dict[str, Callable[[], argparse.ArgumentParser]] = {
        "%carme_run": _run_parser,
        "%%carme_run": _run_parser,
        "%carme_stage": stage_parser,
        "%carme_scale": _scale_parser,
    }
    for name, parser in parsers.items():
        shell.set_hook("complete_command", _completer(parser), str_key=name)
        # Its result may get a name: data = %carme_stage ...
        named = rf"[^%]*=\s*{re.escape(name)}\s"
        shell.set_hook("complete_command", _completer(parser, with_names=True), re_key=named)


def _completer(
    parser: Callable[[], argparse.ArgumentParser], with_names: bool = False
) -> Callable[..., list[str]]:
    """What completes a line; `with_names`: also files of the working folder, which IPython leaves out."""

    def complete(shell: Any, event: SimpleNamespace) -> list[str]:
        """IPython calls it for a word of the line; an empty answer leaves paths to IPython."""
        words = event.text_until_cursor.split()
        typed = event.symbol
        if "--" in words[: -1 if typed else None]:
            return []  # what follows belongs to the program
        before = words[-2] if typed and len(words) > 1 else words[-1]
        option, equals, _value = words[-1].partition("=")
        if equals and not event.text_until_cursor[-1].isspace():
            before = option  # IPython takes what follows for a word of its own
        actions = parser()._actions
        for action in actions:
            if before in action.option_strings and action.nargs != 0:
                return [str(choice) for choice in action.choices or ()]
        if not typed.startswith("-"):
            return _files(typed) if with_names and "/" not in typed else []
        return sorted(name for action in actions for name in action.option_strings)

    return complete


def _files(beginning: str) -> list[str]:
    """Files and folders of the working folder; those with spaces would need quotes."""
    found: list[Path] = []
    with contextlib.suppress(OSError):  # the folder is gone, or cannot be read
        found += [path for path in Path().iterdir() if path.name.startswith(beginning)]
    shown = [path for path in found if beginning or not path.name.startswith(".")]
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in shown if " " not in path.name)


def _run_parser() -> argparse.ArgumentParser:
    from carme_runtime.launcher.arguments import parser

    return parser()


def _scale_parser() -> argparse.ArgumentParser:
    """Without what the magic says itself: that it is a probe, and where its result goes."""
    from carme_runtime.scaling.start import add_fine_options

    parser = argparse.ArgumentParser(add_help=False)
    add_fine_options(parser)
    return parser
