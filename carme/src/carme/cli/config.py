"""`carme config check`."""

import argparse
import asyncio
import os

from carme.cli.output import print_json
from carme.command_line import add_json
from carme.config import DEFAULT_PATH, load
from carme.errors import ConfigError


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("config", help="show and check the site's configuration")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = actions.add_parser("check", help="check a configuration file")
    check.add_argument("file", nargs="?", metavar="FILE", help="the file (default: the site's)")
    add_json(check)
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    file = options.file or os.environ.get("CARME_CONFIG") or str(DEFAULT_PATH)
    try:
        settings = load(file)
    except ConfigError as error:
        if not options.json:
            raise
        print_json({"file": file, "ok": False, "problems": str(error).splitlines()})
        return 1
    # Only now: few commands need it. On the broker's host this is what the broker does.
    from carme.slurm.selection import choose

    slurm = asyncio.run(choose(settings)).sentence
    if options.json:
        print_json({"file": file, "ok": True, "problems": [], "slurm": slurm})
    else:
        print(f"{file} is right: site {settings.site.name!r} at {settings.site.url}.")
        print(slurm)
    return 0
