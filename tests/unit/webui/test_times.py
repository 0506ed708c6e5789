"""Moments on pages: for the browser's clock, with the site's on hover and without JavaScript."""

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from auditlog.models import LogEntry
from bs4 import BeautifulSoup
from django.conf import settings as django_settings
from django.template import Context, Template
from django.utils import timezone, translation

from carme.jobs.times import moment_text
from carme.translation import message
from carme.translation import moment as at
from carme_webui.accounts.models import User
from carme_webui.accounts.zone import zone_of
from carme_webui.announcements.models import Maintenance, News
from carme_webui.api.models import Token
from carme_webui.bookings.models import Booking
from carme_webui.clocks import short_words
from carme_webui.jobs.models import Job
from carme_webui.jobs.templatetags.times import STYLES, moment, span
from carme_webui.jobs.templatetags.translated import translated
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import notify
from carme_webui.projects.models import Membership, Project

from .conftest import Browser, text, words
from .fake_broker import FakeBroker, make_job

NOON = datetime(2026, 11, 20, 12, 0, 5, tzinfo=UTC)


@pytest.fixture
def berlin(settings: Any) -> None:
    place = django_settings.SITE.site.model_copy(update={"time_zone": "Europe/Berlin"})
    settings.SITE = django_settings.SITE.model_copy(update={"site": place})


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (900, "15 min"),
        (3599, "1 h"),
        (4500, "1 h 15 min"),
        (86_399, "1 d"),
        (2 * 86_400 + 3 * 3600 + 59, "2 d 3 h"),
        (400 * 86_400, "400 d"),
    ],
)
def test_a_length_of_time_has_at_most_two_units_on_one_line(seconds: float, words: str) -> None:
    for language in ("en", "de"):
        with translation.override(language):
            assert short_words(seconds) == words.replace(" ", "\xa0")


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("clock", "13:00 CET"),
        ("seconds", "13:00:05 CET"),
        ("short", "20 Nov, 13:00 CET"),
        ("minutes", "20 Nov 2026, 13:00 CET"),
        ("long", "20 Nov 2026, 13:00:05 CET"),
        ("day", "20 Nov 2026"),
    ],
)
def test_a_moment_is_by_the_sites_clock_until_the_browser_knows_better(
    berlin: None, style: str, words: str
) -> None:
    time = BeautifulSoup(moment(NOON, style), "html.parser").time
    assert time is not None and time.text == words
    assert (time["datetime"], time["data-style"]) == ("2026-11-20T12:00:05Z", style)
    assert time["title"] == "20 Nov 2026, 13:00:05 CET"
    assert moment(None, style) == ""


def test_a_moment_is_shown_by_its_distance(berlin: None) -> None:
    found = moment(timezone.now() - timedelta(hours=3), "ago")
    assert ">3 hours ago</time>" in found.replace("\xa0", " ") and " CE" in found
    with translation.override("de"):
        assert ">vor 3 Stunden<" in moment(timezone.now() - timedelta(hours=3), "ago").replace("\xa0", " ")


def test_a_span_has_both_ends(berlin: None) -> None:
    found = span(SimpleNamespace(start=NOON, end=NOON + timedelta(hours=2)))
    time = BeautifulSoup(found, "html.parser").time
    assert time is not None and "13:00" in time.text and time.text.endswith("15:00 (Europe/Berlin)")
    assert (time["data-style"], time["data-end"]) == ("span", "2026-11-20T14:00:05Z")


@pytest.mark.parametrize("page", ["/", "/jobs/", "/jobs/7/"])
def test_pages_have_moments_for_the_browser_and_its_script(
    browser: Browser, broker: FakeBroker, page: str
) -> None:
    now = timezone.now()
    Job.store([broker.put(make_job(7, started=now - timedelta(minutes=5), submitted=now, kind="batch"))])
    answer = BeautifulSoup(browser.get(page).content, "html.parser")
    assert answer.select_one("script[src*='carme/times.']") is not None
    moments = answer("time")
    assert moments or page == "/"
    for element in moments:
        assert (
            element["data-style"] in {*STYLES, "span"}
            and str(element["datetime"]).endswith("Z")
            and element["title"]
        )


def test_lists_have_moments_by_their_distance(
    browser: Browser, root: Browser, admin: User, alice: User, broker: FakeBroker
) -> None:
    broker.home.mkdir()
    (broker.home / "data.txt").write_text("x")
    Token.make(alice, "laptop", ["jobs"], timezone.now() + timedelta(days=30))
    News.objects.create(title="New nodes", text="There are two more.", by=admin)
    alice.email = "new@carme.example"
    alice.save()
    lists = {"/files/": browser, "/tokens/": browser, "/announcements/": browser, "/admin/record/": root}
    for page, reader in lists.items():
        moments = BeautifulSoup(reader.get(page).content, "html.parser").select("main time")
        listed = {str(time["data-style"]) for time in moments if not time.find_parent("details")}
        assert listed == ({"day"} if page == "/tokens/" else {"ago"}), page


def test_times_in_sentences_are_for_the_browser_too(
    browser: Browser, alice: User, broker: FakeBroker, frozen_clock: None
) -> None:
    free = timezone.now().replace(microsecond=0) + timedelta(hours=3)
    why = message("4 GPUs <free> until {until} at the latest", until=moment_text(free, timezone.now()))
    Job.store([broker.put(make_job(7, kind="batch", state="PENDING"))])
    Job.objects.update(explanation=why)
    for page in ("/", "/jobs/", "/jobs/7/"):
        answer = BeautifulSoup(browser.get(page).content, "html.parser")
        sentence = answer.find(string=re.compile("GPUs <free> until"))
        assert sentence is not None and sentence.parent is not None, page
        time = sentence.parent.time
        assert time is not None and time["datetime"] == f"{free:%Y-%m-%dT%H:%M:%SZ}" and time["title"], page
        assert f"{free:%H:%M}" in time.text and " at the latest" in sentence.parent.text


# --- the reader's own zone -------------------------------------------------------------------------------


@pytest.fixture
def booked(alice: User, rules: Any, berlin: None) -> Booking:
    """Alice's, on a day to come from 3:00 to 5:00 by the clocks of UTC."""
    start = (timezone.now() + timedelta(days=1)).replace(hour=3, minute=0, second=0, microsecond=0)
    return Booking.objects.create(
        name="carme-0123456789ab", owner=alice, title="Mine", partition="gpu", gpu_type="a100",
        gpus_per_node=4, node_names=["n1"], start=start, end=start + timedelta(hours=2), state="approved",
    )  # fmt: skip


def test_bookings_are_by_the_readers_clocks_with_the_sites_on_hover(
    browser: Browser, root: Browser, alice: User, booked: Booking
) -> None:
    project = Project.objects.create(name="vision", title="Vision")
    Membership.objects.create(project=project, user=alice, manager=True)
    start = booked.start - timedelta(hours=1)
    Maintenance.objects.create(title="Cooling", start=start, end=booked.end, node_names=["n1"], by=alice)
    pages = {"/bookings/": browser, f"/bookings/{booked.name}/delete/": browser}
    pages |= {"/projects/at/vision/": browser, "/maintenance/": root, "/admin/approvals/": root}
    for state in ("approved", "requested"):
        Booking.objects.filter(pk=booked.pk).update(state=state, project=project)
        for page, reader in pages.items():
            if (page == "/admin/approvals/") != (state == "requested"):
                continue
            reader.cookies["carme_zone"] = "Asia/Tokyo"
            content = BeautifulSoup(reader.get(page).content, "html.parser")
            times = content.select(f'time[data-style=span][datetime="{booked.start:%Y-%m-%dT%H:%M:%SZ}"]')
            assert times, page
            for element in times:
                assert clock(booked.start, "Asia/Tokyo") in element.text, page
                assert clock(booked.start, "Europe/Berlin") in str(element["title"]), page
    hours = BeautifulSoup(browser.get("/bookings/").content, "html.parser").select(".calendar th.hour time")
    at = datetime.fromisoformat(str(hours[0]["datetime"]))
    assert hours and f"{clock(at, 'Europe/Berlin')}:00 CE" in str(hours[0]["title"])


def clock(moment: datetime, zone: str) -> str:
    return f"{moment.astimezone(ZoneInfo(zone)):%H:%M}"


def test_calendar_and_mails_are_by_the_browsers_clocks(
    browser: Browser, bobs_browser: Browser, alice: User, booked: Booking
) -> None:
    browser.cookies["carme_zone"] = "Asia/Tokyo"
    page = words(browser.get("/bookings/"))
    assert f"{clock(booked.start, 'Asia/Tokyo')} to {clock(booked.end, 'Asia/Tokyo')} (Asia/Tokyo)" in page
    assert "Times are in Asia/Tokyo." in page
    cells = BeautifulSoup(browser.get("/bookings/").content, "html.parser").select("a.free")
    assert str(cells[0]["data-start"]).endswith("+09:00")
    # The next user, in another time zone, is not affected.
    assert "Times are in Europe/Berlin." in words(bobs_browser.get("/bookings/"))
    # It is kept for mails, which no browser asks for.
    alice.refresh_from_db()
    assert alice.browser_zone == "Asia/Tokyo"
    notify(alice, lambda: booked.span)
    assert Notice.objects.get(user=alice).text.endswith(f"{clock(booked.end, 'Asia/Tokyo')} (Asia/Tokyo)"), (
        "a zone that is not the site's is named"
    )


def test_what_is_typed_is_by_the_same_clocks(browser: Browser, booked: Booking) -> None:
    browser.cookies["carme_zone"] = "Asia/Tokyo"
    day = (timezone.now() + timedelta(days=3)).astimezone(ZoneInfo("Asia/Tokyo")).date()
    fields = {"kind": "gpu:a100:4", "nodes": 1, "length": "1h", "date": day.isoformat(), "time": "09:00"}
    answer = browser.send("/bookings/new/", "/bookings/new/", **fields)
    assert answer.status_code == 302
    booking = Booking.objects.exclude(pk=booked.pk).get()
    assert booking.start == datetime(day.year, day.month, day.day, tzinfo=UTC), (
        "nine in Tokyo is midnight in UTC"
    )


def test_two_devices_in_two_zones_do_not_write_all_the_time(
    browser: Browser, alice: User, booked: Booking
) -> None:
    for zone in ("Asia/Tokyo", "America/New_York", "Asia/Tokyo"):
        browser.cookies["carme_zone"] = zone
        assert f"Times are in {zone}." in words(browser.get("/bookings/"))
    alice.refresh_from_db()
    assert alice.browser_zone == "Asia/Tokyo"
    browser.cookies["carme_zone"] = "America/New_York"
    browser.get("/bookings/")
    alice.refresh_from_db()
    assert alice.browser_zone == "Asia/Tokyo", "for an hour"
    changes = LogEntry.objects.get_for_object(alice)
    assert not [change for change in changes if "browser_zone" in change.changes_dict]


def test_a_form_is_read_by_the_clocks_that_it_was_written_by(browser: Browser, booked: Booking) -> None:
    browser.cookies["carme_zone"] = "Asia/Tokyo"
    form = BeautifulSoup(browser.get("/bookings/new/").content, "html.parser")
    (hidden,) = form.select("input[name=zone]")
    assert (hidden["type"], hidden["value"]) == ("hidden", "Asia/Tokyo")
    day = (timezone.now() + timedelta(days=3)).astimezone(ZoneInfo("Asia/Tokyo")).date()
    fields = {"kind": "gpu:a100:4", "nodes": 1, "length": "1h", "date": day.isoformat(), "time": "09:00"}
    browser.cookies["carme_zone"] = "America/New_York"
    browser.send("/bookings/new/", "/bookings/new/", zone="Asia/Tokyo", **fields)
    booking = Booking.objects.exclude(pk=booked.pk).get()
    assert booking.start == datetime(day.year, day.month, day.day, tzinfo=UTC)
    for zone in ("Nowhere/Else", "../x"):
        answer = browser.send("/bookings/new/", "/bookings/new/", zone=zone, **(fields | {"nodes": 99}))
        assert "Times are in America/New_York." in words(answer)


def test_moments_are_by_the_chosen_zone(
    browser: Browser, alice: User, broker: FakeBroker, berlin: None
) -> None:
    now = timezone.now()
    Job.store([broker.put(make_job(7, started=now - timedelta(minutes=5), submitted=now, kind="batch"))])
    browser.cookies["carme_zone"] = "Asia/Tokyo"
    page = BeautifulSoup(browser.get("/jobs/7/").content, "html.parser")
    assert page.html is not None and "data-zone" not in page.html.attrs, "the script knows the browser's"
    assert any("JST" in element.text for element in page("time"))
    site = f"{now.astimezone(ZoneInfo('Europe/Berlin')):%Z}"
    assert all(site in str(element["title"]) for element in page("time")), "the site's on hover"
    User.objects.filter(pk=alice.pk).update(time_zone="Asia/Kolkata")
    page = BeautifulSoup(browser.get("/jobs/7/").content, "html.parser")
    assert page.html is not None and page.html["data-zone"] == "Asia/Kolkata"
    assert any("IST" in element.text for element in page("time"))


def test_a_refusal_is_by_the_same_clocks(browser: Browser, booked: Booking) -> None:
    browser.cookies["carme_zone"] = "Asia/Tokyo"
    day = (timezone.now() - timedelta(days=2)).date()
    fields = {"kind": "gpu:a100:4", "nodes": 1, "length": "1h", "date": day.isoformat(), "time": "09:00"}
    answer = browser.send("/bookings/new/", "/bookings/new/", **fields)
    assert answer.status_code == 422
    found = re.search(
        r"The earliest start now is \w+ \d+ \w+, (\d\d):\d\d\. Times are in Asia/Tokyo\.", words(answer)
    )
    assert found is not None, words(answer)
    hours = (int(found[1]) - timezone.now().astimezone(ZoneInfo("Asia/Tokyo")).hour) % 24
    assert hours <= 2, "soon by the clocks of Tokyo"


def test_ones_own_choice_comes_first_and_nonsense_is_ignored(
    browser: Browser, alice: User, berlin: None
) -> None:
    for cookie in ("Nowhere/Else", "../../etc/passwd", "x" * 500, ""):
        browser.cookies["carme_zone"] = cookie
        assert browser.get("/profile/").status_code == 200
    alice.refresh_from_db()
    assert alice.browser_zone == "" and zone_of(alice) is None
    appearance = {"language": "", "theme": ""}
    browser.send("/profile/", "/profile/appearance/", time_zone="x", **appearance)
    assert "no such choice" in text(browser.get("/profile/"))
    browser.send("/profile/", "/profile/appearance/", time_zone="America/New_York", **appearance)
    browser.cookies["carme_zone"] = "Asia/Tokyo"
    assert "selected>America/New_York" in text(browser.get("/profile/"))
    alice.refresh_from_db()
    assert zone_of(alice) == ZoneInfo("America/New_York") and alice.browser_zone == "Asia/Tokyo"


@pytest.mark.parametrize("timed", [False, True])
def test_a_sentence_is_escaped_once(timed: bool) -> None:
    at = moment_text(NOON, NOON) if timed else "noon"
    sentence = message("It's <b> until {until}.", until=at)
    page = Template("{% load translated %}{{ one|translated|truncatechars_html:160 }}")
    assert page.render(Context({"one": sentence})).startswith("It&#x27;s &lt;b&gt; until ")
    assert Template("{% load translated %}{{ one|translated }}").render(Context({"one": "a'b"})) == "a&#x27;b"


@pytest.mark.parametrize("year", [1, 9999])
def test_a_time_of_no_clock_stays_as_it_is_written(year: int) -> None:
    end = datetime(year, 12, 31, 23, tzinfo=UTC) if year > 1 else datetime(1, 1, 1, tzinfo=UTC)
    sentence = message("Until {end}{unwritten}.", end=at("then", end), unwritten=at("", NOON))
    assert translated(sentence) == "Until then."
