"""Moments on pages: for the browser's clock, with the site's on hover and without JavaScript."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.conf import settings as django_settings
from django.utils import timezone, translation

from carme_webui.jobs.models import Job
from carme_webui.jobs.templatetags.times import STYLES, moment, span

from .conftest import Browser
from .fake_broker import FakeBroker, make_job

NOON = datetime(2026, 11, 20, 12, 0, 5, tzinfo=UTC)


@pytest.fixture
def berlin(settings: Any) -> None:
    place = django_settings.SITE.site.model_copy(update={"time_zone": "Europe/Berlin"})
    settings.SITE = django_settings.SITE.model_copy(update={"site": place})


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
    for one in moments:
        assert one["data-style"] in {*STYLES, "span"} and str(one["datetime"]).endswith("Z") and one["title"]
