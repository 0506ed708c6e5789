"""`carme-portal onboard NAME`: make all that a new user needs, in one step."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from carme.command_line import add_json
from carme.errors import CarmeError
from carme_webui.accounts.management.options import add_account
from carme_webui.administration.people import onboard
from carme_webui.cluster import broker
from carme_webui.projects.models import Project


class Command(BaseCommand):
    help = "Make a user's portal account, association, home, quotas and membership; what is there stays."

    def add_arguments(self, parser: CommandParser) -> None:
        add_account(parser)
        parser.add_argument("--project", help="project to join")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        name: str = options["name"]
        project = None
        if options["project"]:
            project = Project.objects.filter(name=options["project"], closed=None).first()
            if project is None:
                raise CommandError(
                    f"There is no open project {options['project']!r}. See 'Projects' in the portal."
                )
        try:
            user, password, done = onboard("root", name, options["email"] or "", project, broker())
        except CarmeError as error:
            raise CommandError(str(error)) from None
        if options["json"]:
            self.stdout.write(json.dumps({"user": user.username, "password": password, "done": done}))
            return
        self.stdout.write(f"{user.username} can work now: {', '.join(done) or 'all was there already'}.")
        if password:
            self.stdout.write(f"The first password, shown this once: {password}")
