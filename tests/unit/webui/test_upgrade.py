"""A portal of today on the database of the first version: nothing is lost, and every page shows it."""

import hashlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.hashers import make_password
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from .conftest import PASSWORD, Browser, Program
from .fake_broker import FakeBroker, make_job
from .fake_hub import FakeHub

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
SECRET = "carme_token-of-the-first-version"
#: The tables of the first version that are still there, by their models of today, with the rows of this test.
ROWS = {
    "accounts.User": 3,
    "administration.AuditEntry": 1,
    "announcements.Maintenance": 1,
    "announcements.News": 1,
    "api.Token": 1,
    "bookings.Booking": 2,
    "bookings.Calendar": 1,
    "bookings.Feed": 1,
    "images.OwnImage": 1,
    "jobs.Job": 2,
    "jobs.Mirror": 1,
    "notebooks.Session": 2,
    "profile.Notice": 1,
    "projects.Invitation": 1,
    "projects.Membership": 2,
    "projects.Project": 1,
}
#: Pages of alice and of an administrator, each with what it has to show of those rows.
ALICES = {
    "/": ("Digits of old", "A booking of old", "News of old"),
    "/sessions/s0000000a/": ("Digits of old",),
    "/sessions/s0000000b/": ("Ended of old",),
    "/jobs/": ("batch of old",),
    "/jobs/8/": ("batch of old", "research"),
    "/jobs/month/": (),
    "/jobs/submit/": (),
    "/bookings/": ("A booking of old",),
    "/bookings/carme-000000000001/": ("A booking of old", "n1"),
    "/bookings/carme-000000000002/": ("Over of old",),
    "/images/": ("An image of old",),
    "/images/at/mine@alice/": ("An image of old",),
    "/projects/": ("Vision of old",),
    "/projects/at/vision/": ("Vision of old", "root1"),
    "/projects/at/vision/use/": (),
    "/announcements/": ("News of old",),
    "/profile/": ("A notice of old",),
    "/tokens/": ("laptop of old",),
    "/datasets/": (),
    "/help/": (),
}
ADMINS = {
    "/": (),
    "/admin/": (),
    "/admin/record/": (),
    "/admin/users/": ("alice",),
    "/admin/users/at/alice/": ("alice",),
    "/admin/jobs/": (),
    "/admin/nodes/": (),
    "/admin/approvals/": (),
    "/admin/policies/": (),
    "/maintenance/": ("Maintenance of old",),
    "/announcements/1/": ("News of old",),
}
API = {
    "profile": "alice",
    "sessions": "Digits of old",
    "jobs": "batch of old",
    "bookings": "A booking of old",
    "projects": "Vision of old",
    "images/own": "An image of old",
    "notices": "A notice of old",
    "news": "News of old",
    "maintenance": "Maintenance of old",
}


def migrate(target: list[tuple[str, str]]) -> Any:
    executor = MigrationExecutor(connection)
    executor.migrate(target)
    return executor.loader.project_state(target).apps


def own_labels() -> list[str]:
    graph = MigrationExecutor(connection).loader.graph
    own = [app.label for app in apps.get_app_configs() if app.name.startswith("carme_webui.")]
    return [label for label in own if (label, "0001_initial") in graph.nodes]


def fill(old: Any) -> None:
    """What a small site had in its tables after a week."""
    now = timezone.now().replace(microsecond=0)

    def add(model: str, **values: Any) -> Any:
        return old.get_model(model).objects.create(**values)

    password = make_password(PASSWORD)
    alice = add("accounts.User", username="alice", password=password, email="alice@example.org")
    bob = add("accounts.User", username="bob", password=password)
    root = add("accounts.User", username="root1", password=password, is_staff=True)
    add("administration.Deed", text="Node n1 was drained", by=root)
    add(
        "announcements.Maintenance", title="Maintenance of old", node_names=["n3"], kept=now, by=root,
        start=now + 2 * DAY, end=now + 3 * DAY,
    )  # fmt: skip
    add("announcements.News", pk=1, title="News of old", text="Text", by=root)
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    add(
        "api.Token", owner=alice, label="laptop of old", start=SECRET[:10], digest=digest,
        scopes=["sessions"], expires=now + 30 * DAY,
    )  # fmt: skip
    project = add("projects.Project", name="vision", title="Vision of old", gpus=4, kept=now)
    add("projects.Membership", project=project, user=root, manager=True)
    add("projects.Membership", project=project, user=alice)
    add("projects.Invitation", project=project, user=bob, by=root)
    add(
        "images.OwnImage", owner=alice, name="mine", title="An image of old", kind="packages", base="torch",
        text="numpy", file="/home/alice/mine.sif", state="ready", built=now, project=project,
    )  # fmt: skip
    add("profile.Notice", user=alice, text="A notice of old")
    fill_work(add, alice, now)


def fill_work(add: Callable[..., Any], alice: Any, now: datetime) -> None:
    """Alice's bookings, jobs and sessions; the broker knows two of the jobs."""
    booked = {
        "owner": alice,
        "partition": "gpu",
        "gpu_type": "a100",
        "gpus_per_node": 2,
        "node_names": ["n1"],
    }
    add(
        "bookings.Booking", name="carme-000000000001", title="A booking of old", state="approved", kept=now,
        start=now + HOUR, end=now + 2 * HOUR, users=["bob"], **booked,
    )  # fmt: skip
    add(
        "bookings.Booking", name="carme-000000000002", title="Over of old", state="ended", ended=now - DAY,
        start=now - 2 * DAY, end=now - DAY, **booked,
    )  # fmt: skip
    add("bookings.Calendar", pk=1)
    add("bookings.Feed", owner=alice, number=3)
    jobs = ((7, "session-s0000000a", "session", ""), (8, "batch of old", "batch", "research"))
    for number, name, kind, account in jobs:
        add(
            "jobs.Job", id=number, key="ab" * 16, kind=kind, image="torch", name=name, user="alice",
            account=account, partition="gpu", state="RUNNING", reason="", explanation="", nodes=1,
            node_list="n1", gpus=1, gpu_type="a100", cpus=4, memory_mb=8192, minutes_limit=600,
            submitted=now - HOUR, started=now - HOUR, active=True,
        )  # fmt: skip
    add("jobs.Mirror", pk=1, cursor="9", updated=now)
    form = {"image": "torch", "partition": "gpu", "nodes": 1, "gpus_per_node": 1, "minutes": 600}
    session = add(
        "notebooks.Session", name="s0000000a", owner=alice, state="running", job_id=7,
        options={**form, "title": "Digits of old"}, created=now - HOUR, changed=now - HOUR,
    )  # fmt: skip
    add("notebooks.Event", session=session, state="running", at=now - HOUR)
    add(
        "notebooks.Session", name="s0000000b", owner=alice, state="ended", gone=now,
        options={**form, "title": "Ended of old"}, created=now - HOUR, changed=now - HOUR,
    )  # fmt: skip


@pytest.fixture
def upgraded(transactional_db: None) -> Iterator[None]:
    """The first version's tables and rows, brought up to date."""
    latest = MigrationExecutor(connection).loader.graph.leaf_nodes()
    labels = own_labels()
    try:
        foreign = [node for node in latest if node[0] not in labels]
        fill(migrate([*foreign, *((label, "0001_initial") for label in labels)]))
        migrate(latest)
        yield
    finally:
        migrate(latest)


@pytest.mark.django_db(transaction=True)
def test_nothing_of_the_first_version_is_lost_and_every_page_shows_it(
    upgraded: None, broker: FakeBroker, hub: FakeHub
) -> None:
    # One test, as bringing tables up from the first version takes a while.
    check_rows()
    assert missing_on_pages(broker) == []


def check_rows() -> None:
    """Fail if a row is lost."""
    assert {name: apps.get_model(name).objects.count() for name in ROWS} == ROWS
    booking = apps.get_model("bookings.Booking").objects.get(title="A booking of old")
    assert (booking.users, booking.node_names, booking.state) == (["bob"], ["n1"], "approved")
    assert booking.reserved is not None and booking.session_stage == []
    session = apps.get_model("notebooks.Session").objects.get(name="s0000000a")
    assert (session.state, session.job_id, session.settled) == ("ready", 7, False)
    job = apps.get_model("jobs.Job").objects.get(id=8)
    assert (job.account, job.active, job.minutes_limit) == ("research", True, 600)
    # Rows of today find numbers that are free.
    assert apps.get_model("accounts.User").objects.create(username="carol").pk > booking.owner_id


def missing_on_pages(broker: FakeBroker) -> list[str]:
    """What the pages and the API do not show, and those that fail."""
    now = timezone.now()
    for number, name, kind in ((7, "session-s0000000a", "session"), (8, "batch of old", "batch")):
        broker.put(make_job(number, name=name, kind=kind, account="research", started=now))
    missing = []
    for user, pages in (("alice", ALICES), ("root1", ADMINS)):
        browser = Browser()
        signed_in = browser.send("/accounts/login/", "/accounts/login/", login=user, password=PASSWORD)
        assert signed_in.status_code == 302, signed_in.content.decode()
        for page, texts in pages.items():
            answer = browser.get(page)
            html = answer.content.decode()
            if answer.status_code != 200:
                missing.append(f"{user} {page}: {answer.status_code}")
            missing += [f"{user} {page}: {text}" for text in texts if text not in html]
    program = Program(SECRET)
    for path, text in API.items():
        answer = program.ask("get", path)
        if answer.status_code != 200 or text not in answer.content.decode():
            missing.append(f"API {path}: {answer.status_code} {answer.content.decode()[:200]}")
    return missing
