"""`carme-portal seed-sandbox`: what a sandbox's portal begins with (`./dev`)."""

import json
import sys
import time
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from carme.bookings import BookingRequest
from carme.errors import CarmeError
from carme_webui.accounts.models import User
from carme_webui.bookings import services as bookings
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker as site_broker
from carme_webui.jobs.backfill import backfill_jobs
from carme_webui.projects import services as projects
from carme_webui.projects.models import Membership, Project

#: Seconds that the broker gets to look at its cluster.
PATIENCE = 60.0


class Command(BaseCommand):
    help = (
        "Make a sandbox's tables, users, a project and a booking. Reads the users from standard input: "
        '[{"name": ..., "password": ..., "admin": false}]. Writes "users" when they can sign in.'
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEBUG:
            raise CommandError("This is for sandboxes only, as ./dev makes them: it sets users' passwords.")
        call_command("migrate", interactive=False, verbosity=0)
        call_command("sync_clients", stdout=self.stderr)
        users = [_user(**values) for values in json.load(sys.stdin)]
        self.stdout.write("users")
        self.stdout.flush()
        _wait_for_broker()
        backfill_jobs(site_broker())
        members = [user for user in users if not user.is_staff]
        admin = next(user for user in users if user.is_staff)
        _project(admin, members)
        _booking(members[0])
        self.stdout.write("all")


def _user(name: str, password: str, admin: bool) -> User:
    user = User.objects.filter(username=name).first() or User(username=name)
    user.set_password(password)
    user.is_staff = user.is_superuser = admin
    user.save()
    return user


def _wait_for_broker() -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            site_broker().cluster()
            return
        except CarmeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _project(admin: User, members: list[User]) -> None:
    """A project of all members; the first one manages it."""
    if Project.objects.filter(name="vision").exists():
        return
    project = projects.create(admin, "vision", "Computer vision", members[0], site_broker())
    for member in members[1:]:
        Membership.objects.create(project=project, user=member)
    projects.limit(admin, project, {"gpus": 4, "gpu_hours": 1000}, site_broker())


def _booking(owner: User) -> None:
    """A node for tomorrow morning."""
    if Booking.objects.filter(owner=owner).exists():
        return
    start = (timezone.now() + timedelta(days=1)).replace(hour=9, minute=0, second=0, microsecond=0)
    node = next(node for node in site_broker().cluster().nodes if node.gpus)
    kind, gpus = next(iter(node.gpus.items()))
    proposed = BookingRequest(
        partition="gpu", gpu_type=kind, gpus_per_node=gpus, start=start, minutes=120, title="Group meeting"
    )
    bookings.book(owner, proposed, settings.SITE, site_broker())
