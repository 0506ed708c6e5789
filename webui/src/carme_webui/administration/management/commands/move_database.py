"""`carme-portal move-database ADDRESS`: copy the portal's database from SQLite to PostgreSQL."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from carme.backup.moving import check_move
from carme.errors import CarmeError
from carme_webui.administration.moving import move_database


class Command(BaseCommand):
    help = "Copy the portal's database from SQLite to an empty database on a PostgreSQL server."
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "address",
            metavar="ADDRESS",
            help="postgresql://USER@HOST/NAME, without a password: set PGPASSWORD for that",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        target: str = options["address"]
        try:
            file = check_move(settings.SITE, "portal", target)
            counts = move_database(target)
        except CarmeError as error:
            raise CommandError(str(error)) from None
        filled = {table: count for table, count in counts.items() if count}
        for table, count in sorted(filled.items()):
            self.stdout.write(f"{count:>9}  {table}")
        self.stdout.write(
            f"{sum(filled.values())} rows of {len(filled)} tables copied and compared. "
            f"Set carme_portal_database to {target} and run site.yml. {file} is as it was."
        )
