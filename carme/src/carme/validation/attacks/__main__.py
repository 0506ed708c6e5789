"""`python -m carme.validation.attacks`: one user's attacks on another, on the running site."""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

from carme.command_line import add_account, add_certificate, add_image, add_partition
from carme.config import load
from carme.errors import CarmeError
from carme.validation.attacks import ATTACKS, Fixture, markdown, verdict


def main() -> int:
    """Run all attacks; 0 if each was stopped, 1 if one was not, 2 if they could not be made."""
    parser = argparse.ArgumentParser(
        prog="python -m carme.validation.attacks",
        description="Let one account attack another on the running site. Run it as root on the head. The "
        "accounts' passwords are read from standard input, one a line: the victim's first.",
    )
    parser.add_argument("--victim", required=True, metavar="NAME", help="account that is attacked")
    parser.add_argument("--attacker", required=True, metavar="NAME", help="account that attacks")
    add_certificate(parser)
    add_image(parser, "image of both sessions (default: the site's default image)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of each session (default: 1)")
    add_partition(parser, "partition of both sessions (default: the site's)")
    add_account(parser, "Slurm account that pays (default: each user's own)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only attacks with this in their name")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the report as a page")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the report for programs")
    options = parser.parse_args()
    try:
        if os.geteuid() != 0:
            raise CarmeError("Only root can act as both accounts.", "Run it with sudo, on the head.")
        passwords = [sys.stdin.readline().rstrip("\n") for _ in range(2)]
        fixture = Fixture(
            load(),
            options.certificate,
            (options.victim, passwords[0]),
            (options.attacker, passwords[1]),
            options.image or load().images.default,
            options.gpus,
            {"partition": options.partition or "", "account": options.account or ""},
        )
        wanted = [attack for attack in ATTACKS if options.only in f"{attack.area}: {attack.name}"]
        with fixture:
            report = verdict(wanted, fixture, lambda line: print(line, file=sys.stderr, flush=True))
    except CarmeError as error:
        print(f"attacks: {error}", file=sys.stderr)
        return 2
    except Exception:
        # Python's own exit code would say that an attack was not stopped.
        traceback.print_exc()
        return 2
    if options.markdown:
        options.markdown.write_text(markdown(report))
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
