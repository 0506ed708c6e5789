"""Bookings for a project: its members use them, its budget pays, Slurm keeps them for its account."""

from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.utils import timezone

from carme.bookings import BookingRequest
from carme.config import Settings
from carme.errors import InvalidRequest
from carme_webui.accounts.models import User
from carme_webui.bookings import services
from carme_webui.bookings.forms import kinds
from carme_webui.bookings.ics import secret_of
from carme_webui.bookings.models import Booking
from carme_webui.bookings.reconcile import reconcile
from carme_webui.cluster import broker as site_broker
from carme_webui.profile.kinds import Kind
from carme_webui.profile.models import Notice
from carme_webui.projects.models import Membership, Project
from carme_webui.sessions.models import Session

from .conftest import Browser, program_of, text
from .fake_broker import FakeBroker
from .test_bookings import book, make, tomorrow


@pytest.fixture
def vision(alice: User, bob: User) -> Project:
    """A project of Alice and Bob."""
    project = Project.objects.create(name="vision", title="Computer vision")
    Membership.objects.create(project=project, user=alice, manager=True)
    Membership.objects.create(project=project, user=bob)
    return project


@pytest.fixture
def carol(db: None) -> Browser:
    """The browser of somebody who is not in it."""
    found = Browser()
    found.force_login(User.objects.create_user("carol"))
    return found


# --- the site's rules, for a partition and for a project -------------------------------------------------

RULES = {
    "longest_minutes": (60, "lasts at most 1 hour"),
    "notice_minutes": (2880 * 2, "must be made at least"),
    "horizon_days": (1, "at most 1 day ahead"),
    "at_a_time": (1, "1 booking in partition"),
    "share_percent": (40, "At most"),
    "gpu_hours": (
        11,
        r"costs 8 GPU-hours, but (you have|the project 'vision' has) only 7 left of the 11 "
        r"that (you|it) may book in 28 days\.",
    ),
    "approval_gpu_hours": (7, ""),
}


def with_rule(settings: Any, level: str, name: str, rule: str) -> None:
    values = settings.SITE.model_dump(exclude={"partitions", "projects"})
    values["bookings"] = {"enabled": True, "share_percent": 100, "notice_minutes": 0, "at_a_time": 9}
    settings.SITE = Settings.model_validate(values | {level: {name: {"bookings": {rule: RULES[rule][0]}}}})


def in_three_days(minutes: int, project: str = "", hour: int = 0) -> BookingRequest:
    start = timezone.now().replace(microsecond=0) + timedelta(days=3, hours=hour)
    return BookingRequest(
        partition="gpu", gpu_type="a100", gpus_per_node=4, start=start, minutes=minutes, project=project
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("level", "name", "ruled", "free"),
    [("partitions", "gpu", "", None), ("partitions", "cpu", None, ""), ("projects", "vision", "vision", "")],
)
def test_each_rule_holds_for_its_partition_or_project_alone(
    alice: User,
    bob: User,
    vision: Project,
    broker: FakeBroker,
    settings: Any,
    rule: str,
    level: str,
    name: str,
    ruled: str | None,
    free: str | None,
) -> None:
    with_rule(settings, level, name, rule)
    site = settings.SITE
    if rule in ("at_a_time", "gpu_hours"):  # 4 GPU-hours that count
        with_rule(settings, "projects", "none", rule)
        services.book(alice, in_three_days(60, ruled or "", 9), settings.SITE, site_broker())
    if ruled is not None:
        owner = bob if ruled else alice  # a project's rules count what its members have booked
        message = RULES[rule][1]
        if message:
            with pytest.raises(InvalidRequest, match=message) as caught:
                services.book(owner, in_three_days(120, ruled), site, site_broker())
            if ruled and rule in ("at_a_time", "gpu_hours", "share_percent"):
                assert "project 'vision'" in str(caught.value)
        else:
            assert services.book(owner, in_three_days(120, ruled), site, site_broker()).state == "requested"
    if free is not None:
        assert services.book(bob, in_three_days(120, free, 12), site, site_broker()).state == "approved"


def test_a_project_has_at_most_its_share_at_a_time(
    alice: User, vision: Project, broker: FakeBroker, settings: Any
) -> None:
    nodes = [node.model_copy(update={"available": True}) for node in broker.cluster.nodes]
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes})
    with_rule(settings, "projects", "vision", "share_percent")
    settings.SITE.projects["vision"] = settings.SITE.projects["vision"].model_copy(
        update={"bookings": settings.SITE.project_bookings("vision").model_copy(update={"share_percent": 50})}
    )
    booking = services.book(alice, in_three_days(120, "vision"), settings.SITE, site_broker())
    with pytest.raises(InvalidRequest, match=r"At most 4 GPUs .* project 'vision'.* 0 more"):
        services.book(alice, in_three_days(120, "vision"), settings.SITE, site_broker())
    own = services.book(alice, in_three_days(120), settings.SITE, site_broker())
    assert own.node_names != booking.node_names
    services.change(booking, in_three_days(180, "vision"), settings.SITE, site_broker())
    assert booking.minutes == 180, "its own share counts once"


def test_administrators_see_the_rules_of_partitions_and_projects(
    alice: User, browser: Browser, broker: FakeBroker, settings: Any
) -> None:
    User.objects.filter(pk=alice.pk).update(is_staff=True, is_superuser=True)
    for level, name, shown in (
        ("partitions", "gpu", "Partition gpu"),
        ("projects", "vision", "Project vision"),
    ):
        with_rule(settings, level, name, "gpu_hours")
        page = text(browser.get("/admin/policies/"))
        assert shown in page and "bookings.gpu_hours" in page


def test_only_members_may_use_a_projects_booking(
    browser: Browser,
    bobs_browser: Browser,
    carol: Browser,
    vision: Project,
    broker: FakeBroker,
    rules,
) -> None:
    assert book(browser, project="vision").status_code == 302
    row = Booking.objects.get()
    [requested] = broker.requests_of("reserve")
    assert requested.hold.accounts == ["carme-vision"] and requested.hold.users == []
    assert broker.reservations[row.name].accounts == ["carme-vision"]
    page = text(bobs_browser.get(row.get_absolute_url()))
    assert "Computer vision" in page and "booked by alice" in page and "Start a session in it" in page
    assert row.get_absolute_url() in text(bobs_browser.get("/bookings/"))
    assert carol.get(row.get_absolute_url()).status_code == 404
    assert row.get_absolute_url() in text(bobs_browser.get("/projects/at/vision/"))
    # Only who booked it changes it.
    assert bobs_browser.get(f"{row.get_absolute_url()}change/").status_code == 404
    reconcile(site_broker())
    assert len(broker.requests_of("reserve")) == 1, "both agree"
    Membership.objects.filter(user__username="bob").delete()
    assert bobs_browser.get(row.get_absolute_url()).status_code == 404


def test_only_members_of_an_open_project_book_for_it(
    carol: Browser, vision: Project, broker: FakeBroker, rules
) -> None:
    assert 'name="project"' not in text(carol.get("/bookings/new/"))
    proposed = BookingRequest(
        partition="gpu", gpu_type="a100", gpus_per_node=4, start=tomorrow(), minutes=60, project="vision"
    )
    user = User.objects.get(username="carol")
    body = proposed.model_dump(mode="json")
    answer = program_of(user).ask("post", "bookings", body)
    assert answer.status_code == 422 and answer.json()["field"] == "project"
    vision.closed = timezone.now()
    vision.save()
    answer = program_of(User.objects.get(username="bob")).ask("post", "bookings", body)
    assert answer.status_code == 422 and not Booking.objects.exists()


def test_sessions_in_a_projects_booking_belong_to_the_project(
    browser: Browser,
    bobs_browser: Browser,
    vision: Project,
    alice: User,
    broker: FakeBroker,
    rules,
) -> None:
    now = timezone.now()
    row = make(alice, -1, 60, project=vision, reserved=now, session_image="torch")
    broker.carry_out(_reserve(row))
    reconcile(site_broker())
    session = Session.objects.get()
    assert session.options["account"] == "carme-vision" and session.options["reservation"] == row.name
    assert {notice.user.username for notice in Notice.objects.filter(kind=Kind.BOOKING_BEGINS)} == {
        "alice",
        "bob",
    }
    form = text(bobs_browser.get(f"/?booking={row.name}"))
    assert '<option value="carme-vision" selected>' in form
    sent = {
        "image": "torch", "gpus_per_node": 4, "nodes": 1, "minutes": 10, "gpu_type": "a100",
        "reservation": row.name,
    }  # fmt: skip
    refused = bobs_browser.send("/", "/sessions/start/", **sent, account="")
    assert refused.status_code == 422 and "Choose that project as well." in text(refused)


def _reserve(row: Booking):
    from carme.broker import protocol

    return protocol.Reserve(hold=row.reservation_spec, user=row.owner.username)


def test_the_projects_budget_pays_and_its_members_see_it(
    browser: Browser,
    bobs_browser: Browser,
    vision: Project,
    broker: FakeBroker,
    rules,
) -> None:
    rules(gpu_hours=1)  # what one user may book counts for nothing here
    Project.objects.update(gpu_hours=20, used={"gpu_hours": 2.5})
    assert book(browser, project="vision").status_code == 302  # 8 GPU-hours
    refused = book(bobs_browser, 14, project="vision", length="3h")  # 12 more
    assert refused.status_code == 422
    reason = "costs 12 GPU-hours; of the 20 of the project vision, 9.5 are neither used nor booked"
    assert reason in text(refused)
    assert book(bobs_browser, 14, project="vision", length="2h").status_code == 302
    assert "18.5 of 20" in text(bobs_browser.get("/projects/at/vision/"))
    # What is deleted is credited.
    row = Booking.objects.get(owner__username="alice")
    browser.send("/bookings/", f"{row.get_absolute_url()}delete/")
    assert "10.5 of 20" in text(bobs_browser.get("/projects/at/vision/"))
    bobs_booking = Booking.objects.get(owner__username="bob")
    change = f"{bobs_booking.get_absolute_url()}change/"
    assert 'name="project"' in text(bobs_browser.get(change))
    longer = {"kind": "gpu:a100:4", "nodes": 1, "length": "4h", "title": ""}
    when = tomorrow(14)
    longer |= {"date": f"{when:%Y-%m-%d}", "time": f"{when:%H:%M}"}
    assert bobs_browser.send(change, change, **longer).status_code == 302, "its own hours count once"
    bobs_booking.refresh_from_db()
    assert bobs_booking.minutes == 240 and bobs_booking.project == vision


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"partitions": ["cpu"]}, "may not use the partition gpu"),
        ({"gpus": 3}, "3 GPUs at most; 4 were requested"),
        ({"gpu_types": {"a100": 0}}, "0 GPUs at most"),
        ({"minutes": 30}, "30 minutes at most"),
    ],
)
def test_what_it_may_not_use_cannot_be_booked_for_it(
    browser: Browser,
    vision: Project,
    broker: FakeBroker,
    rules,
    limits: dict[str, Any],
    sentence: str,
) -> None:
    Project.objects.update(**limits)
    refused = book(browser, project="vision")
    assert refused.status_code == 422 and sentence in text(refused)
    assert not Booking.objects.exists() and not broker.reservations


def test_a_projects_booking_is_handed_over_to_members_only(
    alice: User,
    bob: User,
    vision: Project,
    broker: FakeBroker,
    rules,
) -> None:
    row = make(alice, project=vision)
    stranger = User.objects.create(username="carol")
    services.offer(row, "carol")
    with pytest.raises(InvalidRequest, match="project that you are not in"):
        services.accept(row, stranger, _site(), site_broker())
    services.offer(row, "bob")
    services.accept(row, bob, _site(), site_broker())
    assert row.owner == bob and row.reservation_spec.accounts == ["carme-vision"]


def _site():
    from django.conf import settings

    return settings.SITE


def test_a_list_of_them_asks_no_more_with_more(
    browser: Browser,
    alice: User,
    vision: Project,
    broker: FakeBroker,
    rules,
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    def queries() -> list[int]:
        found = []
        for path in (
            "/bookings/",
            f"/bookings/feed/alice/{secret_of(alice)}.ics",
            "/projects/at/vision/",
            "/",
        ):
            browser.get(path)
            with CaptureQueriesContext(connection) as requested:
                browser.get(path)
            found.append(len(requested))
        return found

    make(alice, project=vision)
    few = queries()
    for number in range(10):
        make(alice, 60 + number, 120, project=vision)
    assert queries() == few


def test_the_form_begins_with_the_default_partition(broker: FakeBroker, rules: Any) -> None:
    cluster = broker.cluster
    batch = cluster.partitions[0].model_copy(update={"name": "batch", "default": False})
    cluster = cluster.model_copy(update={"partitions": [batch, *cluster.partitions]})
    assert [kind.partition for kind in kinds(cluster, django_settings.SITE)] == ["gpu", "batch"]
