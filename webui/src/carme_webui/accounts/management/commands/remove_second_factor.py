"""`carme-portal remove-second-factor NAME`: for users who have lost their phone and their recovery codes."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from carme.command_line import add_json
from carme_webui.accounts.models import User
from carme_webui.accounts.second_factor import remove_second_factor


class Command(BaseCommand):
    help = "Remove app, passkeys and recovery codes of an account, after you have made sure who asks."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="the account's name")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        name: str = options["name"]
        user = User.objects.filter(username=name).first()
        if user is None:
            raise CommandError(f"There is no account {name!r}. 'carme-portal add-user' makes one.")
        removed = remove_second_factor(user)
        if options["json"]:
            self.stdout.write(json.dumps({"user": name, "removed": removed}))
        else:
            self.stdout.write(
                f"Removed the second factor of {name}." if removed else f"{name} has no second factor."
            )
