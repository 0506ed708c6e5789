"""Buttons that destroy something or change who may do what need a second click."""

from datetime import datetime, timedelta
from typing import Any

from bs4 import BeautifulSoup
from django.utils import timezone

from carme_webui.accounts.models import User
from carme_webui.announcements.models import Maintenance, News
from carme_webui.api.models import Token
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker as site_broker
from carme_webui.projects import services
from carme_webui.projects.models import Invitation, Membership, Project
from carme_webui.sessions.models import Preset

from .conftest import Browser, text
from .fake_broker import FakeBroker


def test_what_cannot_be_undone_or_gives_rights_needs_a_second_click(
    root: Browser, admin: User, alice: User, bob: User, rules: Any, broker: FakeBroker
) -> None:
    begins = timezone.now() + timedelta(hours=5)
    fill_with_what_needs_it(admin, alice, bob, begins)
    offered, requested = Booking.objects.order_by("start")
    for path, wanted in {
        "/": ["delete"],
        "/admin/users/at/bob/?job=7": ["close", "second-factor"],
        "/admin/users/at/alice/": ["open", "second-factor"],
        "/projects/": ["no"],
        "/projects/at/vision/": ["close", "manager", "member", "remove", "remove", "withdraw"],
        "/projects/at/speech/": ["reopen", "withdraw"],
        "/announcements/": ["delete"],
        "/maintenance/": ["cancel"],
        "/tokens/": ["revoke"],
        "/bookings/": ["renew"],
        offered.get_absolute_url(): ["withdraw"],
        requested.get_absolute_url(): ["decline", "deny"],
        "/admin/approvals/": ["deny"],
    }.items():
        page = BeautifulSoup(text(root.get(path)), "html.parser")
        found = page.select("form [popover] button:not([type=button])")
        assert sorted(str(button["value"]) for button in found) == wanted, path
        assert all(not page.select(f"button[value={value}]:not([popover] *)") for value in wanted)
        asking = [str(part["id"]) for part in page.select("form .confirm[popover]")]
        assert len(asking) == len(set(asking)) == len(wanted)
        assert set(asking) == {
            str(button["popovertarget"]) for button in page.select('main [popovertarget^="confirm-"]')
        }
        # What the page itself is about, such as a job, is no part of the buttons' names.
        assert not [button for button in page.select("main button[popovertarget]") if "job 7" in button.text]


def fill_with_what_needs_it(admin: User, alice: User, bob: User, begins: datetime) -> None:
    """Make what the administrator `admin` can take from others, give to them, or lose."""
    project = services.create(admin, "vision", "Computer vision", bob, site_broker())
    Membership.objects.create(project=project, user=User.objects.create_user("carol"))
    Invitation.objects.create(project=project, user=alice, by=admin)
    closed = Project.objects.create(name="speech", title="Speech", granted=begins, closed=begins)
    Invitation.objects.create(project=closed, user=admin, by=bob)
    Preset.objects.create(owner=admin, name="small", options={"image": "torch", "minutes": 30})
    Token.make(admin, "laptop", ["jobs"], timezone.now() + timedelta(days=1))
    News.objects.create(title="New nodes")
    ends = begins + timedelta(hours=1)
    Maintenance.objects.create(title="New cooling", start=begins, end=ends, node_names=["n1"], by=admin)
    alice.is_active = False
    alice.save()
    common = {"partition": "gpu", "gpu_type": "a100", "gpus_per_node": 1, "node_names": ["n1"]}
    for number, (owner, taker, state) in enumerate([(admin, bob, "approved"), (bob, admin, "requested")]):
        start = ends + timedelta(hours=2 * number)
        Booking.objects.create(
            owner=owner, offered_to=taker, state=state, start=start, end=start + timedelta(hours=1), **common
        )
