"""`carme-portal take-in NAME`: the earlier name of `carme-portal onboard NAME`."""

from typing import Any

from carme_webui.accounts.management.commands import onboard


class Command(onboard.Command):
    help = "The earlier name of 'onboard'."

    def handle(self, *args: Any, **options: Any) -> None:
        self.stderr.write("'carme-portal take-in' is 'carme-portal onboard' now. Use the new name.")
        super().handle(*args, **options)
