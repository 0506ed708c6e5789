"""`carme net` and `carme onnx`: commands whose options the training runtime alone understands."""

from __future__ import annotations

import argparse
import importlib

from carme.cli.parsing import pass_on
from carme.errors import CarmeError
from carme.translation import message as _

# Of each command: the module that does it, its help, and its description before that module is imported.
_COMMANDS = {
    "net": (
        "carme_runtime.petri.command",
        "run, watch and feed a workflow that is a Petri net",
        "run, status, put, attach, resume or include. For the help of one of them, run: carme net run --help",
    ),
    "onnx": (
        "carme_runtime.onnx.command",
        "plan and run an ONNX model on several workers",
        "plan or run. For the help of one of them, run: carme onnx plan --help",
    ),
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands; their options are those of `python -m carme_runtime.petri` and `.onnx`."""
    for name, (module, about, description) in _COMMANDS.items():
        parser = commands.add_parser(name, add_help=False, help=about, description=description)
        pass_on(parser)
        parser.set_defaults(run=_run, module=module, name=name)


def _run(options: argparse.Namespace) -> int:
    try:
        module = importlib.import_module(options.module)
    except ImportError:
        raise CarmeError(
            _("The training runtime is not installed here."),
            _(
                "Use carme {command} in a session or job, or install carme-runtime with pip.",
                command=options.name,
            ),
        ) from None
    return module.main(options.words, f"carme {options.name}")
