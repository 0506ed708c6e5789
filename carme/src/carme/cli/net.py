"""`carme net`: workflows as Petri nets."""

from __future__ import annotations

import argparse

from carme.cli.parsing import pass_on
from carme.errors import CarmeError
from carme.translation import message as _


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; its options are those of `python -m carme_runtime.petri`, and stand there alone."""
    parser = commands.add_parser(
        "net",
        add_help=False,
        help="run, watch and feed a workflow that is a Petri net",
        description="run, status, put, attach, resume or include. Each explains itself: carme net run --help",
    )
    pass_on(parser)
    parser.set_defaults(run=_net)


def _net(options: argparse.Namespace) -> int:
    try:
        from carme_runtime.petri.command import main
    except ImportError:
        raise CarmeError(
            _("The training runtime is not installed here."),
            _("Use carme net in a session or job, or install carme-runtime with pip."),
        ) from None
    return main(options.words, "carme net")
