"""`carme-quota NAME`: give a new user the quotas of `carme.toml`, as root."""

import argparse
import pwd
import sys

from carme.command_line import add_config
from carme.config import load
from carme.errors import CarmeError
from carme.storage.space import limit

__all__ = ["main"]

GIB = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    """See that a user has all quotas; limits that are there stay. The exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-quota",
        description="Give a user the quotas of carme.toml where there are none yet. Run it as root.",
    )
    parser.add_argument("name", metavar="NAME", help="the Unix account's")
    add_config(parser)
    options = parser.parse_args(arguments)
    try:
        uid, quotas = pwd.getpwnam(options.name).pw_uid, load(options.config).quotas
    except KeyError:
        print(f"carme-quota: There is no Unix account {options.name!r}.", file=sys.stderr)
        return 1
    except CarmeError as error:
        print(f"carme-quota: {error}", file=sys.stderr)
        return 1
    failed = False
    # One file system that cannot be limited keeps no other from it.
    for path, quota in quotas.items():
        try:
            new_limit = limit(
                str(path), uid, most=quota.limit_gb * GIB, soft=quota.soft_gb * GIB, files=quota.files
            )
        except (CarmeError, OSError) as error:
            print(f"carme-quota: {error}", file=sys.stderr)
            failed = True
        else:
            message = f"{quota.limit_gb} GiB" if new_limit else "the limits that were there stay"
            print(f"{path}: {message}")
    return 1 if failed else 0
