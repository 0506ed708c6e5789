"""`carme report`."""

import argparse

from carme.broker import BrokerClient
from carme.cli.output import plain, print_json
from carme.command_line import add_json
from carme.reports.text import as_html, as_text


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report", help="show how much of its resources a job used, and what to change"
    )
    parser.add_argument("job", type=int, metavar="JOBID")
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument("--html", action="store_true", help="print one HTML page with plots")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    report = BrokerClient().report(options.job)
    if options.json:
        print_json(report)
    elif options.html:
        print(as_html(report), end="")
    else:
        print("\n".join(plain(line) for line in as_text(report).splitlines()))
    return 0
