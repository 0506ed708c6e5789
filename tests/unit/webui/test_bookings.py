"""The calendar: booking, changing, deleting and approving, and what becomes of it in Slurm."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.conf import settings
from django.utils import timezone, translation

from carme.bookings import BookingState, Cause
from carme.errors import InvalidRequest, SlurmError
from carme.jobs import Reservation
from carme_webui.accounts.models import User
from carme_webui.bookings import services
from carme_webui.bookings.ics import calendar_text
from carme_webui.bookings.models import Booking
from carme_webui.clocks import site_zone
from carme_webui.cluster import broker as site_broker
from carme_webui.help_links import explained

from .conftest import Browser, text
from .fake_broker import FakeBroker, make_job

NEW = "/bookings/new/"


#: What `tomorrow` counts from: the same in a test before midnight and after.
BEGUN = timezone.now() + timedelta(hours=1)


def tomorrow(hour: int = 10, days: int = 1) -> datetime:
    """An hour of tomorrow, or of so many days ahead, by the site's clocks, or the next if they change."""
    local = BEGUN.astimezone(site_zone()) + timedelta(days=days)
    day = local.replace(hour=hour, minute=0, second=0, microsecond=0)
    midnight = day.replace(hour=0)
    changes = midnight.utcoffset() != (midnight + timedelta(days=1)).utcoffset()
    return day + timedelta(days=1) if changes else day


def fields(hour: int = 10, **values: Any) -> dict[str, Any]:
    """What the form sends."""
    when = tomorrow(hour)
    sent = {
        "kind": "gpu:a100:4", "nodes": 1, "date": f"{when:%Y-%m-%d}", "time": f"{when:%H:%M}", "length": "2h",
    }  # fmt: skip
    return sent | values


def book(browser: Browser, hour: int = 10, **values: Any):
    return browser.send("/bookings/", NEW, **fields(hour, **values))


def make(owner: User, first: int = 60, last: int = 180, **values: Any) -> Booking:
    """A booking that begins so many minutes from now and ends after so many."""
    now = timezone.now().replace(second=0, microsecond=0)
    given: dict[str, Any] = {
        "owner": owner, "partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "node_names": ["n1"],
        "start": now + timedelta(minutes=first), "end": now + timedelta(minutes=last),
        "state": BookingState.APPROVED,
    }  # fmt: skip
    return Booking.objects.create(**(given | values))


# --- booking ---------------------------------------------------------------------------------------------


def test_a_booking_becomes_a_reservation(
    browser: Browser, alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    answer = book(browser, title="  Thesis   run ", users="bob, alice")
    booking = Booking.objects.get()
    assert answer.status_code == 302 and answer["Location"] == booking.get_absolute_url()
    assert (booking.state, booking.title, booking.users, booking.node_names) == (
        "approved",
        "Thesis run",
        ["bob"],
        ["n1"],
    )
    assert (booking.start, booking.minutes, booking.gpu_hours) == (tomorrow(), 120, 8)
    saved = broker.reservations[booking.name]
    assert (saved.start, saved.end, saved.node_names, saved.users) == (
        booking.start, booking.end, ["n1"], ["alice", "bob"],
    )  # fmt: skip
    assert booking.reserved and not booking.problem
    page = browser.get(booking.get_absolute_url()).content.decode()
    assert "Thesis run" in page and "alice, bob" in page


def test_a_second_booking_gets_another_node_and_a_third_one_the_nearest_times(
    browser: Browser, bobs_browser: Browser, broker: FakeBroker, rules
) -> None:
    assert book(browser).status_code == book(bobs_browser).status_code == 302
    assert {name for reservation in broker.reservations.values() for name in reservation.node_names} == {
        "n1",
        "n2",
    }
    answer = book(bobs_browser, hour=11)
    page = answer.content.decode()
    assert answer.status_code == 422 and Booking.objects.count() == 2
    assert "No node with 4 GPUs of type a100 is free for the whole time" in page
    assert "08:00 to 10:00" in page and "12:00 to 14:00" in page
    slot = re.findall(r'name="slot" value="([^"]+)"', page)[-1]
    assert bobs_browser.send("/bookings/", NEW, **fields(11, slot=slot)).status_code == 302
    assert Booking.objects.filter(start=tomorrow(12), owner__username="bob").exists()


def test_jobs_and_maintenance_have_their_nodes(browser: Browser, broker: FakeBroker, rules) -> None:
    broker.put(make_job(1, user="bob", node_list="n1", started=tomorrow(8), minutes_limit=600))
    broker.reservations["maint"] = Reservation(
        name="maint", start=tomorrow(9), end=tomorrow(11), node_names=["n1", "n2"], maintenance=True
    )
    page = book(browser).content.decode()
    assert "07:00 to 09:00" in page and "11:00 to 13:00" in page
    assert book(browser, hour=11).status_code == 302
    assert Booking.objects.get().node_names == ["n2"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "gpu:a100:2"}, "Nodes are booked whole"),
        ({"kind": "'; drop"}, "must be"),
        ({"kind": "none:a100:4"}, "There is no partition"),
        ({"nodes": 3}, "2 nodes of partition"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"length": "soon"}, "is not a length of time"),
        ({"length": "25h"}, "at most 1 day, not 1 day 1 hour"),
        ({"date": "2000-01-01"}, "cannot begin in the past"),
        ({"date": "9999-12-31", "time": "23:59"}, "too far away"),
        ({"date": "2099-01-01"}, "at most 28 days ahead"),
        ({"date": "tomorrow"}, "Enter a valid date"),
        ({"users": "nobody-here"}, "There is no user"),
        ({"users": "a;b"}, "not a user name"),
        ({"title": "a\u202eb"}, "cannot be seen"),
    ],
)
def test_an_impossible_booking_is_refused_with_a_sentence(
    browser: Browser, broker: FakeBroker, rules, values: dict[str, Any], words: str
) -> None:
    answer = book(browser, **values)
    assert answer.status_code == 422
    assert words in answer.content.decode().replace("&#x27;", "'")
    assert not Booking.objects.exists() and not broker.requests_of("reserve")


def test_the_number_at_a_time_is_limited(browser: Browser, broker: FakeBroker, rules) -> None:
    rules(at_a_time=1)
    assert book(browser).status_code == 302
    answer = book(browser, hour=15)
    assert answer.status_code == 422 and "that is not over; 1 is allowed" in answer.content.decode()


def test_what_was_given_back_is_credited(browser: Browser, alice: User, broker: FakeBroker, rules) -> None:
    rules(gpu_hours=10)
    created = make(alice, -120, 120, state=BookingState.ENDED, cause=Cause.UNUSED)
    Booking.objects.filter(pk=created.pk).update(
        ended=created.start + timedelta(minutes=30)
    )  # 2 of 16 GPU-hours
    assert book(browser).status_code == 302
    answer = book(browser, hour=15, length="30m")
    reason = "The booking costs 2 GPU-hours, but you have only 0 left of the 10 that you may book in 28 days."
    assert reason in answer.content.decode()


def test_slurms_refusal_leaves_no_booking(browser: Browser, broker: FakeBroker, rules) -> None:
    broker.refusal = SlurmError("Other jobs have these nodes.", "Choose another time.", field="start")
    answer = book(browser)
    assert answer.status_code == 422 and "Other jobs have these nodes." in answer.content.decode()
    assert not Booking.objects.exists()


def test_while_slurm_is_away_a_booking_is_made_and_reserved_later(
    browser: Browser, broker: FakeBroker, rules
) -> None:
    broker.refusal = SlurmError("Slurm does not answer.", "Wait.", code="slurm-away")
    assert book(browser).status_code == 302
    booking = Booking.objects.get()
    assert booking.reserved is None and "Slurm does not answer." in booking.problem
    assert "the portal keeps trying" in browser.get(booking.get_absolute_url()).content.decode()


def test_without_the_broker_nothing_can_be_booked_and_the_page_says_so(
    browser: Browser, rules, broker: FakeBroker
) -> None:
    token = browser.token("/bookings/")
    broker.__exit__()
    for page in ("/bookings/", NEW):
        answer = browser.get(page)
        assert answer.status_code == 200 and "does not answer" in answer.content.decode()
    answer = browser.send_with(token, NEW, **fields())
    assert answer.status_code == 422 and not Booking.objects.exists()
    broker.__enter__()


def test_bookings_that_the_site_does_not_allow_cannot_be_made(
    browser: Browser, broker: FakeBroker, rules
) -> None:
    rules(enabled=False)
    assert "Nothing can be booked here" in browser.get("/bookings/").content.decode()
    assert "cannot be booked" in book(browser).content.decode()


def test_the_form_is_filled_in_by_a_link(browser: Browser, broker: FakeBroker, rules) -> None:
    page = browser.get(
        NEW, {"kind": "gpu:a100:4", "start": tomorrow(14).isoformat(), "minutes": "90"}
    ).content.decode()
    assert 'value="14:00"' in page and f'value="{tomorrow():%Y-%m-%d}"' in page and 'value="90m"' in page
    for strange in ("x", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-12:00"):
        assert browser.get(NEW, {"start": strange, "minutes": "9" * 30, "kind": "\0"}).status_code == 200


# --- changing and deleting -------------------------------------------------------------------------------


def test_a_booking_can_be_moved_and_keeps_its_node(
    browser: Browser, alice: User, broker: FakeBroker, rules
) -> None:
    created = make(alice, node_names=["n2"])
    answer = browser.send("/bookings/", f"{created.get_absolute_url()}change/", **fields(12, length="1h"))
    assert answer.status_code == 302
    created.refresh_from_db()
    assert (created.start, created.minutes, created.node_names) == (tomorrow(12), 60, ["n2"])
    assert broker.reservations[created.name].start == created.start


def test_a_change_that_slurm_refuses_changes_nothing(
    browser: Browser, alice: User, broker: FakeBroker, rules
) -> None:
    created = make(alice)
    broker.refusal = SlurmError("Other jobs have these nodes.", "Choose another time.", field="start")
    answer = browser.send("/bookings/", f"{created.get_absolute_url()}change/", **fields(12))
    assert answer.status_code == 422
    now = Booking.objects.get()
    assert (now.start, now.end, now.problem) == (created.start, created.end, "")


def test_a_booking_that_has_begun_can_only_change_its_end(
    browser: Browser, alice: User, broker: FakeBroker, rules
) -> None:
    created = make(alice, -30, 90, state=BookingState.ACTIVE)
    address = f"{created.get_absolute_url()}change/"
    assert "disabled" in browser.get(address).content.decode()
    assert browser.send("/bookings/", address, **fields(length="3h")).status_code == 302
    created.refresh_from_db()
    assert created.minutes == 180 and broker.reservations[created.name].end == created.end
    answer = browser.send("/bookings/", address, **fields(length="20m"))
    assert answer.status_code == 422 and "would be over already" in answer.content.decode()
    proposed = created.proposed.model_copy(update={"start": created.start + timedelta(minutes=5)})
    with pytest.raises(InvalidRequest, match="has begun, so its start cannot change") as refused:
        services.change(created, proposed, settings.SITE, site_broker())
    section = "/help/bookings/#change-shorten-delete"
    assert refused.value.help == section and f'href="{section}"' in explained(refused.value)
    with translation.override("de"):
        assert "Die Buchung hat begonnen" in explained(refused.value)


def test_deleting_gives_the_nodes_back(browser: Browser, alice: User, broker: FakeBroker, rules) -> None:
    book(browser)
    booking = Booking.objects.get()
    address = f"{booking.get_absolute_url()}delete/"
    assert "Delete the booking" in browser.get(address).content.decode()
    browser.send("/bookings/", address)
    booking.refresh_from_db()
    assert (booking.state, booking.cause, booking.gpu_hours) == ("ended", "cancelled", 0)
    assert broker.reservations == {}
    browser.send("/bookings/", address)  # twice does no harm
    assert browser.get(f"{booking.get_absolute_url()}change/").status_code == 302


def test_others_can_neither_see_nor_change_a_booking(
    browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker, rules
) -> None:
    created = make(alice, title="Secret plan")
    for path in ("", "change/", "delete/"):
        assert bobs_browser.get(f"{created.get_absolute_url()}{path}").status_code == 404
    for path in ("change/", "delete/", "decide/"):
        answer = bobs_browser.send("/bookings/", f"{created.get_absolute_url()}{path}", **fields())
        assert answer.status_code == 404
    page = bobs_browser.get(
        "/bookings/", {"day": f"{created.start.astimezone(site_zone()):%Y-%m-%d}"}
    ).content.decode()
    assert "Booked" in page and "Secret plan" not in page and "alice" not in page and created.name not in page
    Booking.objects.update(users=["bob"])
    assert bobs_browser.get(created.get_absolute_url()).status_code == 200
    assert bobs_browser.get(f"{created.get_absolute_url()}change/").status_code == 404


def test_signing_in_is_needed_for_all_but_the_feed(anonymous: Browser, alice: User, rules) -> None:
    created = make(alice)
    for address in ("/bookings/", NEW, created.get_absolute_url()):
        assert anonymous.get(address).status_code == 302


# --- approval --------------------------------------------------------------------------------------------


@pytest.fixture
def manager(bob: User, bobs_browser: Browser) -> Browser:
    """Bob, who is a manager now."""
    bob.is_staff = True
    bob.save()
    return bobs_browser


def test_a_large_booking_waits_for_a_manager(
    browser: Browser, alice: User, manager: Browser, broker: FakeBroker, rules
) -> None:
    rules(approval_gpu_hours=7)
    book(browser)
    booking = Booking.objects.get()
    assert booking.state == BookingState.REQUESTED and broker.reservations == {}
    decide = f"{booking.get_absolute_url()}decide/"
    assert browser.send("/bookings/", decide, answer="approve").status_code == 404
    assert "Waiting for approval" in manager.get("/bookings/").content.decode()
    manager.send("/bookings/", decide, answer="approve")
    booking.refresh_from_db()
    assert booking.state == BookingState.APPROVED and booking.name in broker.reservations
    # To ask for more needs an approval again, and until then nothing is kept.
    browser.send("/bookings/", f"{booking.get_absolute_url()}change/", **fields(length="3h"))
    booking.refresh_from_db()
    assert booking.state == BookingState.REQUESTED and broker.reservations == {}
    manager.send("/bookings/", decide, answer="deny")
    booking.refresh_from_db()
    assert (booking.state, booking.cause) == ("ended", "denied")
    manager.send("/bookings/", decide, answer="approve")
    booking.refresh_from_db()
    assert booking.state == BookingState.ENDED and broker.reservations == {}


def test_what_managers_book_needs_no_approval(manager: Browser, broker: FakeBroker, rules) -> None:
    rules(approval_gpu_hours=7)
    book(manager)
    assert Booking.objects.get().state == BookingState.APPROVED


def test_what_slurm_refuses_is_not_approved(
    browser: Browser, manager: Browser, broker: FakeBroker, rules
) -> None:
    rules(approval_gpu_hours=7)
    book(browser)
    booking = Booking.objects.get()
    broker.refusal = SlurmError("Other jobs have these nodes.", "Choose another time.")
    manager.send("/bookings/", f"{booking.get_absolute_url()}decide/", answer="approve")
    booking.refresh_from_db()
    assert booking.state == BookingState.REQUESTED


# --- the calendar ----------------------------------------------------------------------------------------


def test_a_free_time_of_a_node_books_that_node(browser: Browser, broker: FakeBroker, rules) -> None:
    page = text(browser.get("/bookings/"))
    row = page.split('class="node">n2')[1].split("</tr>")[0]
    link = unescape(re.findall(r'class="free" href="([^"]+)"', row)[-1])
    form = text(browser.get(link))
    assert re.search(r'name="node_names" value="n2"', form)
    book(browser, node_names="n2")
    assert Booking.objects.get().node_names == ["n2"]
    answer = book(browser, node_names="n2")
    assert answer.status_code == 422 and "n2 is not free for the whole time" in text(answer)
    assert "has no node n7" in text(book(browser, node_names="n7"))
    assert "You named 2 nodes but requested 1." in text(book(browser, node_names="n1, n2"))
    book(browser, hour=14, nodes=2, node_names="n2")
    assert Booking.objects.latest("pk").node_names == ["n1", "n2"]


@pytest.mark.parametrize("view", ["day", "week"])
def test_the_calendar_shows_what_is_whose(
    browser: Browser, alice: User, broker: FakeBroker, rules, view: str
) -> None:
    created = make(alice, 60, 120, title="<b>Mine</b>")
    now = timezone.now()
    broker.reservations["maint"] = Reservation(
        name="maint", start=now, end=now + timedelta(days=8), node_names=["n2"], maintenance=True
    )
    broker.put(make_job(7, user="bob", node_list="n1", started=now, minutes_limit=30))
    page = browser.get(
        "/bookings/", {"view": view, "day": f"{created.start.astimezone(site_zone()):%Y-%m-%d}"}
    )
    text = page.content.decode()
    assert "&lt;b&gt;Mine&lt;/b&gt;" in text and "<b>Mine" not in text
    assert "Maintenance" in text and "Europe/Berlin" in text
    assert created.get_absolute_url() in text


def test_free_cells_lead_to_the_form_and_the_past_does_not(
    browser: Browser, broker: FakeBroker, rules
) -> None:
    ahead = f"{tomorrow(days=8):%Y-%m-%d}"
    assert (
        browser.get("/bookings/", {"view": "day", "day": ahead}).content.decode().count('class="free"') == 96
    )
    assert 'class="free"' not in browser.get("/bookings/", {"day": "2020-01-01"}).content.decode()
    for strange in ("x", "0000-00-00", "9999-12-31", "\0"):
        assert (
            browser.get("/bookings/", {"day": strange, "view": strange, "kind": strange}).status_code == 200
        )


def test_the_number_of_queries_does_not_grow_with_the_bookings(
    browser: Browser, alice: User, bob: User, broker: FakeBroker, rules, django_assert_num_queries
) -> None:
    def count() -> int:
        from django.db import connection
        from django.test.utils import CaptureQueriesContext

        with CaptureQueriesContext(
            connection,
        ) as queries:
            assert browser.get("/bookings/").status_code == 200
        return len(queries)

    make(alice)
    browser.get("/bookings/")
    before = count()
    for number in range(20):
        make(bob if number % 2 else alice, 200 + 10 * number, 210 + 10 * number)
    assert count() == before


# --- the feed --------------------------------------------------------------------------------------------


def feed_of(browser: Browser) -> str:
    return re.findall(
        r'id="feed" href="https://carme.example:8443([^"]+)"', browser.get("/bookings/").content.decode()
    )[0]


def test_the_feed_opens_for_who_knows_its_address(
    browser: Browser, bobs_browser: Browser, anonymous: Browser, alice: User, bob: User, broker: FakeBroker,
    rules,
) -> None:  # fmt: skip
    make(alice, title="Alice, her; run", users=["bob"])
    make(bob, title="Not hers")
    address = feed_of(browser)
    answer = anonymous.get(address)
    text = answer.content.decode()
    assert answer.status_code == 200 and answer["Content-Type"].startswith("text/calendar")
    assert r"SUMMARY:Alice\, her\; run" in text and "Not hers" not in text
    assert "Alice" in anonymous.get(feed_of(bobs_browser)).content.decode()
    assert anonymous.get(address.replace("alice", "bob")).status_code == 404
    assert anonymous.get(f"{address[:-6]}x.ics").status_code == 404
    assert anonymous.get("/bookings/feed/nobody/x.ics").status_code == 404
    browser.send("/bookings/", "/bookings/feed/")
    assert anonymous.get(address).status_code == 404
    assert anonymous.get(feed_of(browser)).status_code == 200
    alice.is_active = False
    alice.save()
    assert anonymous.get(address).status_code == 404


def test_the_feed_is_valid_whatever_a_title_holds(alice: User, rules) -> None:
    row = make(alice, title="ä" * 79 + "\n")
    row.title = "ä" * 60 + "\r\nBEGIN:VALARM"
    text = calendar_text([row], datetime(2026, 3, 29, 1, 0, tzinfo=UTC))
    lines = text.split("\r\n")
    assert all(len(line.encode()) <= 75 for line in lines)
    assert "DTSTAMP:20260329T010000Z" in lines
    assert not [line for line in lines if line.startswith("BEGIN:VALARM")]
    unfolded = text.replace("\r\n ", "")
    assert "SUMMARY:" + "ä" * 60 + "BEGIN:VALARM" in unfolded


# --- sessions in a booking -------------------------------------------------------------------------------


def start(browser: Browser, **values: Any):
    sent = {"image": "torch", "gpus_per_node": 4, "nodes": 1, "minutes": 60, "partition": "gpu"}
    return browser.send("/", "/sessions/start/", **(sent | values))


def test_a_session_starts_in_a_booking(
    browser: Browser, alice: User, broker: FakeBroker, hub, at_once, rules
) -> None:
    from carme_webui.sessions.models import Session

    rules()
    created = make(alice)
    page = browser.get("/", {"booking": created.name}).content.decode()
    assert f'value="{created.name}" selected' in page
    assert re.search('name="hours" value="2"', page) and re.search('name="minutes" value="0"', page)
    assert start(browser, reservation=created.name).status_code == 302
    assert Session.objects.get().requested_options.reservation == created.name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"minutes": 121}, "The booking lasts 2 hours more"),
        ({"nodes": 2}, "The booking has 1 node"),
        ({"reservation": "carme-ffffffffffff"}, "over, or you may not use it"),
        ({"reservation": "maint"}, "over, or you may not use it"),
    ],
)
def test_a_session_must_fit_into_its_booking(
    browser: Browser, alice: User, broker: FakeBroker, rules, values: dict[str, Any], words: str
) -> None:
    created = make(alice)
    answer = start(browser, **({"reservation": created.name} | values))
    assert answer.status_code == 422 and words in answer.content.decode()


def test_nobody_starts_in_the_booking_of_somebody_else(
    browser: Browser, bobs_browser: Browser, alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    created = make(alice)
    make(bob)
    answer = start(bobs_browser, reservation=created.name)
    assert answer.status_code == 422 and "you may not use it" in answer.content.decode()
    assert created.name not in bobs_browser.get("/", {"booking": created.name}).content.decode()


# --- a session by itself, and handing over ---------------------------------------------------------------


def act(browser: Browser, row: Booking, what: str, **sent: Any) -> str:
    """Send a form of the booking's page; the text of the page that follows, or of a refusal."""
    token = browser.token("/bookings/")
    answer = browser.send_with(token, f"{row.get_absolute_url()}{what}/", **sent)
    row.refresh_from_db()
    shown = browser.get(answer["Location"]) if answer.status_code == 302 else answer
    return "" if shown.status_code == 404 else shown.content.decode()


def test_a_session_is_planned_and_cancelled(
    browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker, rules
) -> None:
    row = make(alice, users=["bob"])
    assert 'value="torch"' in browser.get(row.get_absolute_url()).content.decode()
    assert "A session starts in the first minute" in act(browser, row, "session", image="torch")
    assert row.session_image == "torch"
    assert 'value="torch" selected' in browser.get(row.get_absolute_url()).content.decode()
    page = act(browser, row, "session", image="no<such")
    assert "no&lt;such" in page and "torch" in page and row.session_image == "torch"
    # Only the owner may change it.
    assert act(bobs_browser, row, "session", image="") == "" and row.session_image == "torch"
    assert "No session starts automatically" in act(browser, row, "session", image="")
    assert row.session_image == ""
    Booking.objects.update(session_name="s12345678")
    assert "has been started already" in act(browser, row, "session", image="torch")
    Booking.objects.update(session_name="", state=BookingState.ENDED, cause=Cause.CANCELLED, ended=row.end)
    assert "This booking is over." in act(browser, row, "session", image="torch")


def test_a_booking_is_handed_over(
    browser: Browser, bobs_browser: Browser, alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    row = make(alice, users=["bob"], session_image="torch")
    broker.reservations[row.name] = Reservation(**row.reservation_spec.model_dump(exclude={"partition"}))
    assert "bob may take over" in act(browser, row, "offer", user=" bob ")
    assert row.owner == alice and row.offered_to == bob
    assert "Offered to you" in bobs_browser.get("/bookings/").content.decode()
    page = act(bobs_browser, row, "answer", answer="accept")
    assert "The booking is yours now." in page and "Change" in page
    assert (row.owner, row.offered_to, row.users, row.session_image) == (bob, None, [], "")
    assert broker.reservations[row.name].users == ["bob"]
    assert browser.get(row.get_absolute_url()).status_code == 404


def test_an_offer_is_declined_or_taken_back(
    browser: Browser, bobs_browser: Browser, alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    row = make(alice)
    act(browser, row, "offer", user="bob")
    act(bobs_browser, row, "answer", answer="no")
    assert row.owner == alice and row.offered_to is None
    act(browser, row, "offer", user="bob")
    assert "stays yours" in act(browser, row, "offer", user="")
    assert act(bobs_browser, row, "answer", answer="accept") == "" and row.owner == alice


@pytest.mark.parametrize("name", ["alice", "nobody", "<b>"])
def test_a_booking_is_offered_to_another_user_alone(
    browser: Browser, alice: User, broker: FakeBroker, rules, name: str
) -> None:
    row = make(alice)
    assert "There is no other user" in act(browser, row, "offer", user=name)
    assert row.offered_to is None


def test_nobody_takes_what_is_not_offered_or_too_much(
    browser: Browser, bobs_browser: Browser, alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    row = make(alice, users=["bob"])
    assert "not offered to you" in act(bobs_browser, row, "answer", answer="accept")
    rules(gpu_hours=7)
    act(browser, row, "offer", user="bob")
    page = act(bobs_browser, row, "answer", answer="accept")
    assert "The booking costs 8 GPU-hours" in page and row.owner == alice
    rules(gpu_hours=8)
    broker.refusal = SlurmError("Slurm does not know bob.", "Ask an administrator.")
    assert "Slurm does not know bob." in act(bobs_browser, row, "answer", answer="accept")
    assert row.owner == alice and row.offered_to == bob
    broker.refusal = None
    assert "yours now" in act(bobs_browser, row, "answer", answer="accept")
