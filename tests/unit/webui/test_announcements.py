"""Maintenance and news: what administrators plan and write, what others see, and what becomes of bookings."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from auditlog.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from carme.bookings import BookingState
from carme.errors import BrokerUnavailable, InvalidRequest, SlurmError
from carme_webui.accounts.models import User
from carme_webui.announcements import services
from carme_webui.announcements.models import Maintenance, News
from carme_webui.bookings import services as bookings
from carme_webui.bookings.models import Booking
from carme_webui.bookings.reconcile import reconcile
from carme_webui.clocks import site_zone
from carme_webui.cluster import broker as site_broker
from carme_webui.profile.kinds import Kind
from carme_webui.profile.models import Notice

from .conftest import Browser, Program, text
from .fake_broker import FakeBroker, make_job
from .test_bookings import book, make


def times(first: int, last: int) -> dict[str, str]:
    """What the form sends for a time so many hours from now."""
    now = timezone.now().astimezone(site_zone()).replace(minute=0)
    start, end = now + timedelta(hours=first), now + timedelta(hours=last)
    return {
        "start_date": f"{start:%Y-%m-%d}", "start_time": f"{start:%H:%M}",
        "end_date": f"{end:%Y-%m-%d}", "end_time": f"{end:%H:%M}",
    }  # fmt: skip


def planned(first: int = 60, last: int = 180, nodes: tuple[str, ...] = ("n1",), **values: Any) -> Maintenance:
    now = timezone.now().replace(second=0, microsecond=0)
    given: dict[str, Any] = {
        "title": "New cables", "start": now + timedelta(minutes=first), "end": now + timedelta(minutes=last),
        "node_names": list(nodes),
    }  # fmt: skip
    return Maintenance.objects.create(**(given | values))


PAGES = ["announcements/new/", "maintenance/new/"]


@pytest.mark.parametrize("page", PAGES)
def test_only_administrators_plan_maintenance_and_write_announcements(
    browser: Browser, root: Browser, broker: FakeBroker, page: str
) -> None:
    assert browser.get(f"/{page}").status_code == 404
    assert browser.send("/profile/", f"/{page}", title="x", **times(2, 3)).status_code == 404
    assert root.get(f"/{page}").status_code == 200
    row, piece = planned(), News.objects.create(title="x")
    for path in (f"/maintenance/{row.pk}/cancel/", f"/announcements/{piece.pk}/delete/"):
        assert browser.send("/profile/", path).status_code == 404
    assert "Plan maintenance" not in text(browser.get("/maintenance/"))
    assert Maintenance.objects.get().cancelled is None and News.objects.count() == 1
    assert not broker.requests_of("maintain")


def test_a_maintenance_is_in_slurm_and_on_every_page_until_it_is_cancelled(
    root: Browser, browser: Browser, admin: User, broker: FakeBroker
) -> None:
    page = "/maintenance/new/"
    sent = {"title": "New <b>cables</b>", "text": "All is back in the evening.", **times(24, 26)}
    assert root.send(page, page, **sent).status_code == 302
    row = Maintenance.objects.get()
    [requested] = broker.requests_of("maintain")
    assert requested.window.node_names == ["n1", "n2", "n3"] and requested.user == "root1"
    assert broker.reservations[row.name].maintenance and row.whole and row.reserved
    for where in ("/", "/jobs/", "/profile/", "/bookings/"):
        shown = text(browser.get(where))
        assert "New &lt;b&gt;cables&lt;/b&gt;" in shown and "All nodes take no jobs then." in shown
    assert "All is back in the evening." in text(browser.get("/maintenance/"))
    assert LogEntry.objects.get_for_object(row).filter(actor=admin).exists()
    edit = f"/maintenance/{row.pk}/"
    root.send(edit, edit, **sent, nodes="n1, n3")
    assert sorted(broker.reservations[row.name].node_names) == ["n1", "n3"]
    assert "2 nodes take no jobs then." in text(browser.get("/"))
    root.send("/maintenance/", f"/maintenance/{row.pk}/cancel/")
    assert not broker.reservations and "cables" not in text(browser.get("/"))
    assert root.send("/maintenance/", f"/maintenance/{row.pk}/cancel/").status_code == 404


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"nodes": "n1, n77"}, "There is no node &#x27;n77&#x27;."),
        (times(3, 2), "It must end after it begins."),
        (times(-5, -3), "This time is over."),
        ({"start_date": "9999-01-01"}, "This day is too far away."),
        ({"title": ""}, "This field is required."),
        ({"title": "a\u202eb"}, "cannot be seen"),
        ({"start_time": "25:00"}, "Enter a valid time."),
    ],
)
def test_a_wrong_maintenance_is_refused_beside_its_field(
    root: Browser, broker: FakeBroker, values: dict[str, str], field: str
) -> None:
    page = "/maintenance/new/"
    answer = root.send(page, page, **({"title": "x", **times(2, 3)} | values))
    assert answer.status_code == 422 and field in text(answer)
    assert not Maintenance.objects.exists() and not broker.reservations


def test_bookings_in_its_time_move_or_are_reported_and_later_ones_are_refused(
    alice: User,
    bob: User,
    admin: User,
    browser: Browser,
    broker: FakeBroker,
    rules,
) -> None:
    first = make(alice, 60, 180, node_names=["n1"])
    row = planned(90, 240)
    services.plan(row, admin, ["n1"], site_broker())
    reconcile(site_broker())
    first.refresh_from_db()
    assert first.node_names == ["n2"] and not first.problem
    reported = [notice.text for notice in Notice.objects.filter(user=alice)]
    assert any("concerns your booking" in text for text in reported)
    assert any("is now on n2, because of maintenance" in text for text in reported)
    # Nowhere to go: it keeps its nodes, and its owner knows.
    second = make(bob, 60, 180, node_names=["n1"])
    reconcile(site_broker())
    second.refresh_from_db()
    assert "is to be maintained then" in second.problem
    for _round in range(3):
        services.reconcile(site_broker())
        reconcile(site_broker())
    kinds = list(Notice.objects.filter(user=bob).values_list("kind", flat=True))
    assert sorted(kinds) == [Kind.BOOKING_PROBLEM, Kind.MAINTENANCE], "each once"
    services.cancel(row, admin, site_broker())
    reconcile(site_broker())
    second.refresh_from_db()
    assert not second.problem


def test_nobody_books_over_a_maintenance_that_slurm_does_not_know_yet(
    browser: Browser,
    broker: FakeBroker,
    rules,
) -> None:
    start = timezone.now() + timedelta(days=1)
    planned(0, 3 * 1440, nodes=("n1", "n2"))
    assert start and not broker.reservations
    answer = book(browser)
    assert answer.status_code == 422 and "is free for the whole time" in text(answer)


def test_two_maintenances_may_overlap(admin: User, broker: FakeBroker) -> None:
    rows = [planned(60, 180), planned(120, 240)]
    assert services.reconcile(site_broker())
    assert set(broker.reservations) == {row.name for row in rows}
    services.cancel(rows[0], admin, site_broker())
    assert set(broker.reservations) == {rows[1].name}


def test_owners_of_jobs_within_it_are_notified_once(alice: User, bob: User, broker: FakeBroker) -> None:
    now = timezone.now()
    broker.put(make_job(7, user="alice", started=now, minutes_limit=120))
    broker.put(make_job(8, user="bob", started=now, minutes_limit=30))
    broker.put(make_job(9, user="bob", state="PENDING"))
    planned(60, 180)
    for _round in range(2):
        services.reconcile(site_broker())
    [notice] = Notice.objects.all()
    assert notice.user == alice and "a job of yours may still run then" in notice.text


def test_rows_and_reservations_match_after_any_outage(admin: User, broker: FakeBroker) -> None:
    broker.refusal = SlurmError("Slurm is away.", code="slurm-away")
    row = planned()
    services.plan(row, admin, ["n1"], site_broker())
    assert row.reserved is None and row.problem == "Slurm is away."
    broker.refusal = None
    services.reconcile(site_broker())
    row.refresh_from_db()
    assert row.reserved and not row.problem
    # Somebody deleted it in Slurm, and somebody else changed it there.
    broker.reservations.clear()
    services.reconcile(site_broker())
    broker.reservations[row.name] = broker.reservations[row.name].model_copy(
        update={"end": row.end + timedelta(hours=9)}
    )
    services.reconcile(site_broker())
    assert broker.reservations[row.name].end == row.end
    # It is over, or was cancelled while the broker was away.
    Maintenance.objects.update(cancelled=timezone.now())
    services.reconcile(site_broker())
    assert not broker.reservations


def test_a_portal_that_never_had_maintenance_leaves_that_of_another_database(
    admin: User, broker: FakeBroker
) -> None:
    row = planned()
    services.plan(row, admin, ["n1"], site_broker())
    Maintenance.objects.all().delete()
    services.reconcile(site_broker())
    assert set(broker.reservations) == {row.name}


def test_without_a_broker_nothing_is_synced(db: None) -> None:
    planned()
    assert not services.reconcile(site_broker())
    with pytest.raises(BrokerUnavailable):
        site_broker().reservations()


def test_what_slurm_refuses_stays_what_it_was(admin: User, broker: FakeBroker) -> None:
    broker.refusal = InvalidRequest("Slurm says no.")
    now = timezone.now().replace(microsecond=0)
    row = Maintenance(title="x", start=now, end=now + timedelta(hours=1))
    with pytest.raises(InvalidRequest):
        services.plan(row, admin, [], site_broker())
    assert not Maintenance.objects.exists()


def test_news_are_on_the_dashboard_until_their_day(
    root: Browser, browser: Browser, broker: FakeBroker
) -> None:
    page = "/announcements/new/"
    today = f"{timezone.now().astimezone(site_zone()):%Y-%m-%d}"
    root.send(page, page, title="<i>New</i> GPUs", text="See https://example.org/gpus", until=today)
    shown = text(browser.get("/"))
    assert "&lt;i&gt;New&lt;/i&gt; GPUs" in shown and 'href="https://example.org/gpus"' in shown
    News.objects.update(until=datetime(2020, 1, 1).date())
    assert "New&lt;/i&gt; GPUs" not in text(browser.get("/"))
    assert "New&lt;/i&gt; GPUs" in text(browser.get("/announcements/"))
    number = News.objects.get().pk
    edit = f"/announcements/{number}/"
    root.send(edit, edit, title="Newer")
    assert News.objects.get().title == "Newer"
    root.send("/announcements/", f"{edit}delete/")
    assert not News.objects.exists()


def test_programs_read_maintenance_and_announcements(
    alice: User, program: Program, broker: FakeBroker
) -> None:
    row = planned(text="Why")
    News.objects.create(title="New GPUs")
    [reported] = program.ask("get", "maintenance").json()
    assert (reported["name"], reported["title"], reported["node_names"]) == (row.name, "New cables", ["n1"])
    assert [entry["title"] for entry in program.ask("get", "news").json()] == ["New GPUs"]


def test_pages_ask_no_more_with_more_of_them(root: Browser, broker: FakeBroker, alice: User) -> None:
    def queries(path: str) -> int:
        root.get(path)
        with CaptureQueriesContext(connection) as requested:
            root.get(path)
        return len(requested)

    planned()
    News.objects.create(title="one")
    make(alice, 60, 120, state=BookingState.REQUESTED)
    paths = ("/announcements/", "/", "/jobs/", "/admin/approvals/")
    few = [queries(path) for path in paths]
    for number in range(10):
        planned(60 + number, 180)
        News.objects.create(title=f"{number}", by=alice)
        make(alice, 60, 120, state=BookingState.REQUESTED)
    assert [queries(path) for path in paths] == few


def test_administrators_decide_bookings_from_the_list_of_approvals(
    root: Browser,
    browser: Browser,
    alice: User,
    broker: FakeBroker,
    rules,
) -> None:
    first, two = (
        make(alice, 60 + n, 180, state=BookingState.REQUESTED, node_names=[f"n{n}"]) for n in (1, 2)
    )
    page = "/admin/approvals/"
    assert browser.get(page).status_code == 404
    assert text(root.get(page)).count('value="approve"') == 2
    sent = root.send(
        page, f"/bookings/{first.name}/decide/", answer="deny", back="queue", reason="100 % are in use <b>"
    )
    assert sent["Location"] == page
    root.send(page, f"/bookings/{two.name}/decide/", answer="approve", back="queue")
    assert "No bookings need approval." in text(root.get(page))
    assert {row.state for row in Booking.objects.all()} == {BookingState.ENDED, BookingState.APPROVED}
    words = [notice.text for notice in Notice.objects.filter(user=alice, kind=Kind.BOOKING_DECIDED)]
    assert words[1].endswith("is refused. 100 % are in use <b>") and words[0].endswith("is approved.")
    assert bookings.check_budget(None, first.proposed) is None
