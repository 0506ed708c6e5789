"""Commands that the training runtime does: `carme scale` and `carme compare`, where it is installed."""

from __future__ import annotations

import argparse
import importlib

from carme.errors import CarmeError
from carme.translation import message as _

# Of each command: what adds its options (of `carme_runtime.options`), the function that does it, its help.
_COMMANDS = {
    "scale": (
        "add_scale_options",
        "carme_runtime.scaling.command:show",
        "predict how training scales, from the result of carme-run --scale-probe",
    ),
    "compare": (
        "add_compare_options",
        "carme_runtime.compare.command:run",
        "measure the same training in every framework that is installed, and write a report",
    ),
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands; their options are those that the runtime declares."""
    for name, (add_options, function, about) in _COMMANDS.items():
        try:
            options = importlib.import_module("carme_runtime.options")
        except ImportError:
            # Without prefix characters all words are arguments: --help gets the sentence that helps, too.
            parser = commands.add_parser(name, help=about, add_help=False, prefix_chars="\0")
            missing = "those of the training runtime, which is not installed here"
            parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help=missing)
        else:
            parser = commands.add_parser(name, help=about)
            getattr(options, add_options)(parser)
        parser.set_defaults(run=_run, command=parser.prog, function=function)


def _run(options: argparse.Namespace) -> int:
    module, _rest, function = options.function.partition(":")
    try:
        do = getattr(importlib.import_module(module), function)
        from carme_runtime.errors import CarmeRuntimeError
    except ImportError:
        raise CarmeError(
            _("The training runtime is not installed here."),
            _(
                "Use {command} in a session or job, or install carme-runtime with pip.",
                command=options.command,
            ),
        ) from None
    try:
        do(options)
    except CarmeRuntimeError as error:
        raise CarmeError(error.message, error.remedy) from None
    return 0
