"""Options that several of the portal's commands have, each declared once."""

from django.core.management.base import CommandParser

__all__ = ["add_account"]


def add_account(parser: CommandParser) -> None:
    """NAME and `--email`: the account that a command makes or changes."""
    parser.add_argument("name", help="the Unix account's name")
    parser.add_argument("--email", help="e-mail address")
