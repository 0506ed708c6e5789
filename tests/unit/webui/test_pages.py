"""What all pages share: headers, tokens, static files, error pages."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from django.urls import path

import carme_webui
from carme.datasets import Datasets
from carme_webui import urls
from carme_webui.celery import app as celery_app
from carme_webui.settings import SESSIONS_AT_ONCE, database_of

from .conftest import Browser
from .fake_broker import FakeBroker

TEMPLATES = Path(carme_webui.__file__).parent / "templates"


def broken(request):
    raise RuntimeError("a secret detail")


urlpatterns = [*urls.urlpatterns, path("broken/", broken)]
handler500 = urls.handler500


@pytest.mark.parametrize("page", ["/accounts/login/", "/", "/jobs/", "/nowhere/", "/jobs/1/"])
def test_every_answer_has_the_security_headers(browser: Browser, broker: FakeBroker, page: str) -> None:
    answer = browser.get(page)
    assert answer["X-Frame-Options"] == "DENY"
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert answer["Referrer-Policy"] == "same-origin"
    assert answer["Strict-Transport-Security"] == "max-age=31536000"
    policy = answer["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("page", ["/accounts/login/", "/", "/jobs/", "/profile/", "/profile/security/"])
def test_pages_need_nothing_that_the_policy_forbids(
    anonymous: Browser, browser: Browser, broker: FakeBroker, page: str
) -> None:
    html = (anonymous if "login" in page else browser).get(page).content.decode()
    # A block of data is not a script.
    data = r'(?![^>]* type="application/json")'
    assert not re.search(rf"<script(?![^>]* src=){data}|<style|\sstyle=|\son\w+=|javascript:", html)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", html)


def test_datasets_of_the_site_are_listed(
    browser: Browser, broker: FakeBroker, tmp_path: Path, settings: Any
) -> None:
    assert "no datasets yet" in browser.get("/datasets/").content.decode()
    staging = settings.SITE.staging.model_copy(update={"datasets": tmp_path / "site"})
    settings.SITE = settings.SITE.model_copy(update={"staging": staging})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/<b>").write_text("12345")
    site = Datasets(tmp_path / "site")
    site.add("mnist", str(tmp_path / "data"), site=True, title="<i>Digits", licence="CC0")
    (tmp_path / "site/broken.json").write_text("{")
    html = browser.get("/datasets/").content.decode()
    assert (
        site.get("mnist").version().short in html
        and "5\N{NO-BREAK SPACE}B" in html
        and "CC0" in html
        and "&lt;i&gt;Digits" in html
    )
    assert "broken" not in html


def test_templates_mark_nothing_safe() -> None:
    assert [
        file for file in TEMPLATES.rglob("*.html") if re.search(r"\|safe|autoescape", file.read_text())
    ] == []


def test_static_files_are_bundled_and_hashed(anonymous: Browser) -> None:
    html = anonymous.get("/accounts/login/").content.decode()
    files = re.findall(r"(?:src|href)=\"(/static/[^\"]+)\"", html)
    assert len(files) >= 3
    for file in set(files):
        assert re.search(r"\.[0-9a-f]{12}\.", file)
        answer = anonymous.get(file)
        assert answer.status_code == 200
        assert "immutable" in answer["Cache-Control"]


@pytest.mark.parametrize("url", ["/sessions/start/", "/accounts/logout/", "/accounts/login/"])
def test_a_form_of_another_site_is_refused_with_the_portals_error_page(
    browser: Browser, broker: FakeBroker, url: str
) -> None:
    answer = browser.post(url, {"title": "x"}, headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "This form did not come from a current page of the portal" in answer.content.decode()


@pytest.mark.parametrize("method", ["put", "delete", "patch", "get"])
def test_start_takes_posts_only(browser: Browser, broker: FakeBroker, method: str) -> None:
    answer = getattr(browser, method)("/sessions/start/")
    assert answer.status_code in (403, 405)


def test_an_address_that_only_takes_forms_says_so_when_a_browser_opens_it(browser: Browser) -> None:
    answer = browser.get("/sessions/start/")
    assert (answer.status_code, answer["Allow"]) == (405, "POST")
    assert "This address only takes what a form sends." in answer.content.decode()


def test_an_unknown_page_is_not_found(browser: Browser, anonymous: Browser) -> None:
    for client in (browser, anonymous):
        answer = client.get("/nowhere/<script>alert(1)</script>")
        assert answer.status_code == 404
        assert "There is no such page, or it is not yours." in answer.content.decode()
        assert "<script>alert" not in answer.content.decode()


@pytest.mark.urls("tests.unit.webui.test_pages" if __name__.startswith("tests") else __name__)
def test_a_failure_says_nothing_of_its_inside(browser: Browser) -> None:
    browser.raise_request_exception = False
    answer = browser.get("/broken/")
    assert answer.status_code == 500
    page = answer.content.decode()
    assert "The portal failed to create this page." in page and "secret detail" not in page


def test_a_foreign_host_is_refused(browser: Browser) -> None:
    answer = browser.get("/", headers={"host": "evil.example"})
    assert answer.status_code == 400
    assert "could not understand" in answer.content.decode()


@pytest.mark.parametrize("page", ["/live/", "/jobs/1/live/", "/sessions/s00000000/live/"])
def test_a_live_part_without_a_login_reloads_the_page(anonymous: Browser, page: str) -> None:
    answer = anonymous.get(page, headers={"hx-request": "true"})
    assert answer.status_code == 401
    assert answer["HX-Refresh"] == "true"


def test_the_sites_name_is_escaped(anonymous: Browser) -> None:
    assert "Test &amp; site" in anonymous.get("/accounts/login/").content.decode()


def test_a_postgresql_database_is_understood() -> None:
    entry = database_of("postgresql://carme:p%40ss@db.example:5433/portal?sslmode=require")
    assert entry["ENGINE"] == "django.db.backends.postgresql"
    assert (entry["NAME"], entry["USER"], entry["PASSWORD"]) == ("portal", "carme", "p@ss")
    assert (entry["HOST"], entry["PORT"], entry["OPTIONS"]["sslmode"]) == ("db.example", "5433", "require")
    # Each of the sync's threads may keep a connection, and so may those that follow and look.
    assert entry["OPTIONS"]["pool"]["max_size"] >= SESSIONS_AT_ONCE + 2


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite://x", "postgresql://host", "nonsense"])
def test_another_database_is_refused_with_what_is_expected(url: str) -> None:
    from carme.errors import ConfigError

    with pytest.raises(ConfigError, match="must be like 'sqlite:////var"):
        database_of(url)


@pytest.mark.skipif("CARME_TEST_DATABASE" in os.environ, reason="this is PostgreSQL")
def test_sqlite_is_in_wal_mode(db) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert cursor.execute("PRAGMA busy_timeout").fetchone() == (20_000,)


def test_the_timetable_names_real_tasks_that_cannot_pile_up() -> None:
    celery_app.loader.import_default_modules()
    timetable = celery_app.conf.beat_schedule
    assert timetable
    for entry in timetable.values():
        assert entry["task"] in celery_app.tasks
        assert entry["options"]["expires"] <= entry["schedule"]


def test_no_migration_is_missing(db) -> None:
    from django.core.management import call_command

    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_djangos_checks_find_nothing_but_what_is_known(db) -> None:
    from django.core.checks import run_checks

    known = {
        "security.W005",  # other hosts below the portal's name are the site's own matter
        "security.W008",  # the reverse proxy leads from HTTP to HTTPS
        "security.W009",  # the tests' key is short
        "security.W021",  # whether browsers list the domain as HTTPS alone, too
    }
    assert [found for found in run_checks(include_deployment_checks=True) if found.id not in known] == []
