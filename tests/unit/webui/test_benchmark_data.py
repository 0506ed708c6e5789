"""What the benchmark of the portal fills the database with fits the portal's tables."""

import importlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.sessions.models import Session

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    found = importlib.import_module("portal")
    monkeypatch.setattr(found, "USERS", 2)
    monkeypatch.setattr(found, "BOOKINGS", 3)
    yield found
    for name in {"portal", "report"} - before:  # no other test finds them
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
