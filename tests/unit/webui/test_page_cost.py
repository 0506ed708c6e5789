"""What a page costs in round trips to Redis and the database, whose number no busy machine changes."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.core.cache import caches
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from redis.connection import AbstractConnection

from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.jobs.models import Job, Mirror
from carme_webui.notifier import Notifier, notifier
from carme_webui.projects.models import Membership, Project

from .conftest import REDIS, Browser, Program, needs_redis
from .fake_broker import FakeBroker, make_job


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is sent to Redis: each entry is one round trip."""
    found: list[Any] = []
    send = AbstractConnection.send_packed_command

    def record(connection: AbstractConnection, command: Any, check_health: bool = True) -> None:
        found.append(command)
        send(connection, command, check_health)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", record)
    return found


@pytest.fixture
def site(alice: User, broker: FakeBroker, rules: Any, caching: None) -> None:
    """Alice has a job, a booking and a project; caches hold."""
    now = timezone.now()
    Mirror.load()
    Job.store([make_job(7, user="alice", state="RUNNING", started=now, submitted=now, node_list="n2")])
    project = Project.objects.create(name="vision", title="Vision", granted=now)
    Membership.objects.create(project=project, user=alice)
    for number in range(2):
        Booking.objects.create(
            owner=alice, partition="gpu", gpu_type="a100", gpus_per_node=4, node_names=["n1"], reserved=now,
            start=now + timedelta(hours=2 + number), end=now + timedelta(hours=3 + number), state="approved",
            project=project if number else None,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "queries"),
    [
        ("/", 9),
        ("/jobs/", 5),
        ("/jobs/?page=4", 5),
        ("/jobs/?q=resnet&state=failed", 4),
        ("/jobs/7/", 4),
        ("/bookings/", 6),
        ("/images/", 5),
        ("/projects/", 6),
        ("/profile/", 6),
    ],
)
def test_a_page_reads_redis_once_and_asks_the_database_few_questions(
    browser: Browser, site: None, sent: list[Any], path: str, queries: int
) -> None:
    assert browser.get(path).status_code == 200  # fills the caches
    sent.clear()
    with CaptureQueriesContext(connection) as requested:
        assert browser.get(path).status_code == 200
    assert len(sent) <= 1, sent
    assert len(requested) <= queries, [query["sql"] for query in requested]


@pytest.mark.parametrize("path", ["jobs", "sessions", "bookings", "cluster"])
def test_an_answer_of_the_api_reads_redis_once_and_asks_the_database_few_questions(
    program: Program, site: None, sent: list[Any], path: str
) -> None:
    assert program.ask("GET", path).status_code == 200
    sent.clear()
    with CaptureQueriesContext(connection) as requested:
        assert program.ask("GET", path).status_code == 200
    assert len(sent) <= 1, sent
    assert len(requested) <= 2, [query["sql"] for query in requested]


def test_own_bookings_are_read_by_one_question(alice: User, site: None) -> None:
    alice = User.objects.get(pk=alice.pk)
    with CaptureQueriesContext(connection) as requested:
        rows = Booking.related_to(alice)
        assert [row.owner for row in rows] == [alice, alice] and rows[1].project
        assert all(row.offered_to is None for row in rows)
    assert len(requested) == 2, "the other one is for the projects"


def test_bookings_of_others_come_with_their_owners(alice: User, bob: User, site: None) -> None:
    carol = User.objects.create_user("carol")
    Booking.objects.update(owner=bob, users=["alice"], offered_to=carol)
    alice = User.objects.get(pk=alice.pk)
    with CaptureQueriesContext(connection) as requested:
        rows = Booking.related_to(alice)
        assert {row.owner for row in rows} == {bob} and {row.offered_to for row in rows} == {carol}
    assert len(requested) == 4


@needs_redis
def test_versions_are_read_once_until_the_request_itself_reports_a_change(sent: list[Any]) -> None:
    other_process = Notifier(REDIS.address)

    def change() -> None:
        """As another process does."""
        thread = threading.Thread(target=other_process.notify, args=(["alice"],))
        thread.start()
        thread.join()

    first = notifier.version("alice")
    with notifier.reading_once():
        sent.clear()
        assert notifier.version("alice") == first and notifier.common_version() in first
        bookings = notifier.bookings_version()
        assert len(sent) == 1
        change()
        assert notifier.version("alice") == first, "what others change belongs to the next page"
        notifier.count_booking()
        assert notifier.bookings_version() != bookings and notifier.version("alice") != first
        second = notifier.version("alice")
        notifier.notify(["alice"])
        assert notifier.version("alice") != second
    change()
    assert notifier.version("alice") == other_process.version("alice")


@pytest.mark.parametrize("alias", ["pages", "calendars"])
def test_what_pages_have_in_common_is_not_copied_for_each(alias: str) -> None:
    cache, found = caches[alias], ["nodes"]
    cache.set("a", found, 60)
    assert cache.get("a") is found and cache.get_or_set("b", found, 60) is found and cache.get("b") is found
    assert not cache.add("a", []) and cache.add("c", found) and cache.get("c") is found
    cache.set("d", found, 0)
    assert cache.get("d", "nothing") == "nothing" and cache.add("d", found)


def test_bookings_are_found_by_indexes_in_a_table_of_many(alice: User, bob: User) -> None:
    with CaptureQueriesContext(connection) as requested:
        Booking.related_to(alice)
        list(Booking.open().filter(start__lt=timezone.now()).values_list("pk"))
    queries = [query["sql"] for query in requested if '"bookings_booking"' in query["sql"]]
    assert len(queries) == 2
    indexes = ("shared_bookings", "open_bookings")
    with connection.cursor() as cursor:
        known = connection.introspection.get_constraints(cursor, Booking._meta.db_table).keys()
    assert known >= set(indexes)
    if connection.vendor == "postgresql":  # which says what it would read
        now = timezone.now()
        Booking.objects.bulk_create(
            Booking(
                owner=bob, partition="gpu", gpu_type="a100", gpus_per_node=4, node_names=["n1"],
                start=now + timedelta(hours=number), end=now + timedelta(hours=number + 1), state="approved",
            )
            for number in range(3000)
        )  # fmt: skip
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE bookings_booking")
            for query, index in zip(queries, indexes, strict=True):
                cursor.execute(f"EXPLAIN {query}")
                plan = "\n".join(line for (line,) in cursor.fetchall())
                assert index in plan and "Seq Scan on bookings_booking" not in plan, plan
