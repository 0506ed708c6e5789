"""`carme-portal sync-clients`: register JupyterHub with the identity provider."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from carme.command_line import add_json
from carme_webui.accounts.identity import HUB_CLIENT, register_hub


class Command(BaseCommand):
    help = "Register JupyterHub as a client of the portal's identity provider, as carme.toml says."

    def add_arguments(self, parser: CommandParser) -> None:
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        changed = register_hub()
        if options["json"]:
            self.stdout.write(json.dumps({"client": HUB_CLIENT, "changed": changed}))
        else:
            self.stdout.write(
                f"Registered the client {HUB_CLIENT}."
                if changed
                else f"The client {HUB_CLIENT} already has these settings."
            )
