"""What the benchmark of the portal fills the database with fits the portal's tables."""

import importlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.test import RequestFactory

from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.caches import DerivedValues
from carme_webui.cluster import ClusterCache
from carme_webui.sessions.models import Session

from .fake_broker import CLUSTER, FakeBroker

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    found = importlib.import_module("portal")
    monkeypatch.setattr(found, "USERS", 2)
    monkeypatch.setattr(found, "BOOKINGS", 3)
    yield found
    for name in {
        "portal",
        "portal_without",
        "portal_without_settings",
        "report",
    } - before:  # no other test finds them
        sys.modules.pop(name, None)


@pytest.mark.django_db
@pytest.mark.parametrize("year", [False, True])
def test_sessions_and_bookings_are_stored(benchmark: Any, monkeypatch: pytest.MonkeyPatch, year: bool):
    monkeypatch.setattr(benchmark, "YEAR", year)
    now = datetime.now(UTC)
    users = [User.objects.create(username=f"user{number}") for number in range(2)]
    benchmark.store_sessions(users, now)
    benchmark.store_bookings(users, now)
    assert Session.objects.count() == 2
    assert Booking.objects.count() == 3
    assert benchmark.client_of(users[0], 7, now)["job"] == "7"


def test_without_the_cached_answers_each_page_asks_the_broker(
    benchmark: Any, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ClusterCache()
    shown.seconds = 3600.0
    monkeypatch.setattr(ClusterCache, "_cached", importlib.import_module("portal_without").ask_each_time)
    for number in (1, 2):
        assert shown.cluster().nodes == broker.cluster.nodes
        assert shown.running() == []
        assert shown.access("alice").user == "alice"
        assert [len(broker.requests_of(name)) for name in ("cluster", "running", "access")] == [number] * 3


def test_without_derived_values_each_page_computes_them(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DerivedValues, "get", importlib.import_module("portal_without").compute_each_time)
    values, computed = DerivedValues(), iter((7, 8))
    assert [values.get(CLUSTER, "x", lambda _: next(computed)) for _page in range(2)] == [7, 8]


def test_without_the_cache_of_objects_the_portal_has_djangos(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARME_BENCH_WITHOUT", "derived,object-cache")
    found = importlib.import_module("portal_without_settings").CACHES
    backends = {alias: cache["BACKEND"].rpartition(".")[2] for alias, cache in found.items()}
    assert backends == {"default": "DatabaseCache", "pages": "LocMemCache", "calendars": "LocMemCache"}
    assert all(found[alias]["OPTIONS"] == cache["OPTIONS"] for alias, cache in settings.CACHES.items())


@pytest.mark.parametrize(
    ("address", "token", "signed_in", "status"),
    [
        ("/jupyter/user/alice/s1/lab", "", True, 204),
        ("/jupyter/user/alice/s1/lab", "", False, 401),
        ("/jupyter/user/alice/s1/lab", "token x", False, 204),
        ("/jupyter/user/bob/s1/lab", "", True, 403),
        ("/jupyter/hub/home", "", True, 403),
    ],
)
def test_without_the_entrance_a_view_answers_nginx(
    benchmark: Any, alice: User, address: str, token: str, signed_in: bool, status: int
) -> None:
    headers = {"x-original-uri": address, "authorization": token}
    request = RequestFactory(headers=headers).get("/internal/enter")
    request.user = alice if signed_in else AnonymousUser()
    assert importlib.import_module("portal_without").enter_view(request).status_code == status


def test_the_portal_without_a_part_has_settings_of_its_own(benchmark: Any) -> None:
    assert benchmark._settings([]) == {"DJANGO_SETTINGS_MODULE": "carme_webui.settings"}
    found = benchmark._settings(["cache", "entrance"])
    assert found["CARME_BENCH_WITHOUT"] == "cache,entrance"
    assert (BENCHMARKS / f"{found['DJANGO_SETTINGS_MODULE']}.py").is_file()
    assert found["PYTHONPATH"].startswith(str(BENCHMARKS))
