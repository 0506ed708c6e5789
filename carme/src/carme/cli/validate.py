"""`carme validate`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from carme.broker.client import BrokerClient
from carme.cli.output import print_json
from carme.command_line import add_account, add_certificate, add_image, add_json, add_partition
from carme.config import load
from carme.errors import CarmeError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("validate", help="check the installed site as a user would")
    parser.add_argument("--user", required=True, metavar="NAME", help="portal account to check with")
    parser.add_argument(
        "--password-file", required=True, metavar="FILE", help="file with its password; - is standard input"
    )
    parser.add_argument("--url", help="the site's address (default: site.url of carme.toml)")
    add_certificate(parser)
    parser.add_argument(
        "--stranger", metavar="NAME", help="a second account, which must not reach the first one's session"
    )
    parser.add_argument("--stranger-password-file", metavar="FILE", help="file with that account's password")
    add_image(parser, "image of the session (default: images.default of carme.toml)")
    parser.add_argument("--nodes", type=int, help="nodes of the session (default: 2, or what there is)")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs on each node (default: 2, or what its nodes have)"
    )
    add_partition(parser, "partition of the session (default: the site's, else one that takes the user)")
    add_account(parser, "Slurm account that pays for it (default: the site's, else the user's own)")
    parser.add_argument(
        "--training", action="store_true", help="also train the example over all nodes and one rank"
    )
    add_json(parser)
    parser.set_defaults(run=_validate)


def _validate(arguments: argparse.Namespace) -> int:
    try:
        from carme.validation import Account, Validation
        from carme.validation.options import CheckOptions, session_size
    except ModuleNotFoundError as error:
        raise CarmeError(
            f"The checks need the Python package {error.name}, which is not installed here.",
            "Install carme[validation].",
        ) from None
    settings = load()
    if bool(arguments.stranger) != bool(arguments.stranger_password_file):
        raise CarmeError(
            "A second account needs both its name and its password.",
            "Give --stranger and --stranger-password-file.",
        )

    def report(line: str) -> None:
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    wanted = CheckOptions(arguments.partition, arguments.account, arguments.nodes, arguments.gpus)
    broker = BrokerClient()

    def options() -> dict[str, str]:
        size = session_size(wanted, broker.cluster(), broker.access(user=arguments.user), settings)
        return {
            "image": arguments.image or settings.images.default,
            "nodes": str(size.nodes),
            "gpus_per_node": str(size.gpus_per_node),
            "minutes": "30",
            "title": "Site check",
            "partition": size.partition,
            **({"account": size.account} if size.account else {}),
        }

    verdict = Validation(
        url=arguments.url or settings.site.url,
        certificate=arguments.certificate,
        account=Account(arguments.user, _password(arguments.password_file)),
        stranger=Account(arguments.stranger, _password(arguments.stranger_password_file))
        if arguments.stranger
        else None,
        options=options,
        training=arguments.training,
        notify=report,
    ).run()
    if arguments.json:
        print_json(verdict)
    else:
        failed = [check["name"] for check in verdict["checks"] if not check["ok"]]
        skipped = [check["name"] for check in verdict["checks"] if check["skipped"]]
        print(f"Failed: {', '.join(failed)}." if failed else "All checks passed.")
        if skipped:
            print(f"Skipped, with reasons above: {', '.join(skipped)}.")
    return 0 if verdict["ok"] else 1


def _password(file: str) -> str:
    try:
        text = sys.stdin.readline() if file == "-" else Path(file).read_text()
    except OSError as error:
        raise CarmeError(
            f"The password file {file} cannot be read: {os.strerror(error.errno or 0)}.",
            "Name a file that holds the password in its first line.",
        ) from None
    return text.split("\n", 1)[0]
