"""The command `carme-portal`: Django's commands with the portal's settings, and the portal's own."""

import os
import sys

from carme.errors import ConfigError

__all__ = ["main"]


def main() -> None:
    """Run one command. `carme-portal help` lists them; `add-user` and `add_user` are the same."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "carme_webui.settings"
    from django.core.management import ManagementUtility
    from django.core.management.base import BaseCommand

    class Commands(ManagementUtility):
        """Commands that examine the portal's code only if that is what was requested: `carme-portal check`.

        The tests run these checks, too (`test_pages.py`).
        Django loads every page for that, which takes longer than most commands.
        """

        def fetch_command(self, subcommand: str) -> BaseCommand:
            command = super().fetch_command(subcommand)
            if subcommand != "check":
                command.check = lambda *_, **__: None
            return command

    program, *arguments = sys.argv
    if arguments:
        arguments[0] = arguments[0].replace("-", "_") if arguments[0][:1] != "-" else arguments[0]
    try:
        Commands([program, *arguments]).execute()
    except ConfigError as error:
        sys.exit(f"carme-portal: {error}")


if __name__ == "__main__":
    main()
