"""`carme-portal add-user NAME`: create an account, or change its password, address or role."""

import json
import sys
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from carme.command_line import add_json
from carme_webui.accounts.management.options import add_account
from carme_webui.accounts.models import User


class Command(BaseCommand):
    help = "Create or update an account. The password is read from standard input, never from an argument."

    def add_arguments(self, parser: CommandParser) -> None:
        add_account(parser)
        parser.add_argument("--admin", action="store_true", help="make the account an administrator")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        password = sys.stdin.readline().rstrip("\r\n")
        name: str = options["name"]
        user = User.objects.filter(username=name).first()
        created = user is None
        user = user or User(username=name)
        changed = created
        if not password and created:
            raise CommandError(
                "There is no password on standard input. Write it there, for example: "
                "carme-portal add-user NAME < password-file"
            )
        if password and not (user.password and user.check_password(password)):
            user.set_password(password)
            changed = True
        if options["email"] is not None and user.email != options["email"]:
            user.email = options["email"]
            changed = True
        if options["admin"] and not user.is_superuser:
            user.is_staff = user.is_superuser = True
            changed = True
        if changed:
            try:
                user.full_clean()
            except ValidationError as error:
                raise CommandError(" ".join(error.messages)) from None
            user.save()
        if options["json"]:
            self.stdout.write(json.dumps({"user": name, "created": created, "changed": changed}))
        else:
            self.stdout.write(
                f"Created the account {name}."
                if created
                else f"Changed the account {name}."
                if changed
                else f"The account {name} already has these settings."
            )
