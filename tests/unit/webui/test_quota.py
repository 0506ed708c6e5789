"""Quotas: on the dashboard, and before something starts. The kernel's quotas are simulated."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import simulated_quota
from django.conf import settings as django_settings

from .conftest import Browser, Program, words
from .fake_broker import FakeBroker
from .fake_hub import FakeHub
from .session_steps import start
from .test_jobs import FIELDS

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.fixture
def quota(broker: FakeBroker, tmp_path: Path) -> FakeBroker:
    """A home of 2,000,000 KiB at most; `uses` says how much is used."""
    broker.home.mkdir()
    broker.environment["LD_PRELOAD"] = str(simulated_quota.build(tmp_path))
    uses(broker, 1_000_000)
    return broker


def uses(broker: FakeBroker, kibibytes: int) -> None:
    reported = f"{os.getuid()} 2000000 0 {kibibytes << 10} 1000 0 7"
    broker.environment["SIMULATED_QUOTA"] = reported


def test_the_dashboard_reports_quota_and_free_space(browser: Browser, quota: FakeBroker) -> None:
    assert 'hx-get="/files/quota/"' in browser.get("/").content.decode()
    answer = browser.get("/files/quota/")
    assert "Home 976.6 MiB of 1.9 GiB used, 7 of 1000 files" in words(answer)
    assert 'value="50"' in answer.content.decode()
    assert "alert" not in answer.content.decode()
    uses(quota, 1_900_000)
    assert "Home is nearly full" in words(browser.get("/files/quota/"))
    uses(quota, 2_000_000)
    assert "Home is full" in words(browser.get("/files/quota/"))


def test_without_a_quota_the_free_space_is_reported(browser: Browser, quota: FakeBroker) -> None:
    quota.environment.clear()
    found = words(browser.get("/files/quota/"))
    assert re.search(r"Home [\d.]+ [KMGT]iB free", found), found


def test_a_home_that_is_not_there_and_a_broker_that_is_away_hold_up_nothing(
    browser: Browser, broker: FakeBroker, settings: Any, tmp_path: Path
) -> None:
    assert "Home" not in words(browser.get("/files/quota/"))
    site = django_settings.SITE
    away = site.broker.model_copy(update={"socket": tmp_path / "none"})
    settings.SITE = site.model_copy(update={"broker": away})
    answer = browser.get("/files/quota/")
    assert answer.status_code == 200 and not answer.content.strip()


def test_nothing_starts_while_the_home_is_full(browser: Browser, quota: FakeBroker, hub: FakeHub) -> None:
    uses(quota, 2_000_000)
    browser.get("/files/quota/")
    answer = start(browser)
    assert answer.status_code == 422
    assert "Home is full (1.9 GiB of 1.9 GiB used, 7 of 1000 files): nothing can be written there." in words(
        answer
    )
    assert not hub.servers
    # As soon as there is space it starts, without another visit of the dashboard.
    uses(quota, 1_000_000)
    assert start(browser).status_code == 302
    assert len(hub.servers) == 1


def test_the_site_s_other_folders_are_reported_where_they_are_there(
    browser: Browser, quota: FakeBroker, hub: FakeHub, settings: Any
) -> None:
    scratch = quota.home.parent / "scratch"
    scratch.mkdir()
    site = django_settings.SITE
    sessions = site.sessions.model_copy(update={"bind": [scratch, scratch / "none"]})
    settings.SITE = site.model_copy(update={"sessions": sessions})
    found = words(browser.get("/files/quota/"))  # the simulated kernel has the same quota everywhere
    assert "Home 976.6 MiB" in found and "scratch 976.6 MiB" in found and "none" not in found
    assert start(browser).status_code == 302


def test_programs_and_batch_jobs_are_refused_as_well(
    browser: Browser, program: Program, quota: FakeBroker, hub: FakeHub
) -> None:
    uses(quota, 2_000_000)
    browser.get("/files/quota/")
    sentence = "Home is full"
    for path, requested in (
        ("jobs", {"command": ["true"]}),
        ("jobs/check", {"command": ["true"]}),
        ("sessions", {"image": "torch", "minutes": 5}),
    ):
        answer = program.ask("post", path, requested)
        assert answer.status_code == 422 and sentence in answer.json()["detail"], (path, answer.content)
    answer = browser.send("/jobs/submit/", "/jobs/submit/", script="true", **FIELDS)
    assert answer.status_code == 422 and sentence in answer.content.decode()
    assert not hub.servers and not quota.requests_of("submit")
    uses(quota, 1_000_000)
    assert program.ask("post", "jobs", {"command": ["true"]}).status_code == 201
