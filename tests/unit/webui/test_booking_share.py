"""The chart below the calendar: which share of the GPUs is booked on each day, and by whom."""

import json
from datetime import timedelta
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.utils import timezone

from carme.bookings import BookingState, Cause
from carme.jobs import Node, Partition, Reservation
from carme_webui.accounts.models import User
from carme_webui.clocks import site_zone

from .conftest import Browser, text
from .fake_broker import FakeBroker
from .test_bookings import make, tomorrow


def test_the_share_of_each_day_that_is_booked_is_shown_by_whose_it_is(
    browser: Browser, alice: User, bob: User, broker: FakeBroker, rules: Any
) -> None:
    rules(share_percent=50)
    start = tomorrow(0)

    def at(hour: int, **more: Any) -> dict[str, Any]:
        return {"start": start + timedelta(hours=hour), "node_names": ["n2"]} | more

    given_back = {"state": BookingState.ENDED, "ended": start + timedelta(hours=22)}
    several: tuple[tuple[User, int, dict[str, Any]], ...] = (
        (alice, 24, {}),
        (bob, 18, at(0)),  # most of it within the maintenance of that node
        (bob, 21, at(18, users=["alice"], gpus_per_node=2)),
        (bob, 24, at(21, cause=Cause.UNUSED, **given_back)),  # it had the node for an hour
        (bob, 24, at(22, cause=Cause.DENIED, **given_back | {"ended": start + timedelta(hours=23)})),
    )
    for owner, hours, more in several:
        make(owner, 0, 60, **({"start": start, "end": start + timedelta(hours=hours)} | more))
    broker.reservations["maint"] = Reservation(
        name="maint", start=start, end=start + timedelta(hours=12), node_names=["n2"], maintenance=True
    )
    day = f"{start:%Y-%m-%d}"
    page = BeautifulSoup(text(browser.get("/bookings/share/", {"view": "day", "day": day})), "html.parser")
    spec = json.loads(str(page.find("carme-chart")["data-chart"]))  # type: ignore[index]
    whole = (tomorrow(0) + timedelta(days=1) - start) / timedelta(hours=1) * 8
    booked = {"mine": whole / 2, "shared with me": 6, "others": 24 + 4, "maintenance": 48}
    shown = {series["name"]: series["values"] for series in spec["series"]}
    assert shown == {name: [round(100 * used / whole, 1)] for name, used in booked.items()}
    assert sum(values[0] for values in shown.values()) <= 100
    assert spec["line"] == {"name": "may be booked at once", "value": 50.0} and spec["most"] == 100
    assert "/bookings/share/?view=week" in browser.get("/bookings/").content.decode()
    # A limit that is of several kinds of nodes together is in the chart of none of them.
    cluster = broker.cluster
    assert cluster is not None
    broker.cluster = cluster.model_copy(
        update={
            "partitions": [Partition(name="gpu", default=True, node_names=["n1", "n2", "n3"])],
            "nodes": [*cluster.nodes, Node(name="n3", cpus=16, memory_mb=64_000, gpus={"a100": 8})],
        }
    )
    page = BeautifulSoup(text(browser.get("/bookings/share/", {"view": "day", "day": day})), "html.parser")
    assert "line" not in json.loads(str(page.find("carme-chart")["data-chart"]))  # type: ignore[index]


@pytest.mark.usefixtures("frozen_clock")
def test_a_day_that_has_begun_is_the_one_in_words(
    browser: Browser, alice: User, broker: FakeBroker, rules: Any
) -> None:
    first = timezone.now().astimezone(site_zone()) - timedelta(days=3)
    page = BeautifulSoup(
        text(browser.get("/bookings/share/", {"view": "week", "day": f"{first:%Y-%m-%d}"})), "html.parser"
    )
    spec = json.loads(str(page.find("carme-chart")["data-chart"]))  # type: ignore[index]
    assert spec["current"] == 3 and spec["summary"] == f"{spec['labels'][3]}: mine 0\u00a0%"
