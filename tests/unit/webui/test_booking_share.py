"""The chart below the calendar: which share of the GPUs is booked on each day, and by whom."""

import json
from datetime import timedelta
from typing import Any

from bs4 import BeautifulSoup

from carme.bookings import BookingState
from carme.jobs import Reservation
from carme_webui.accounts.models import User

from .conftest import Browser, text
from .fake_broker import FakeBroker
from .test_bookings import make, tomorrow


def test_the_share_of_each_day_that_is_booked_is_shown_by_whose_it_is(
    browser: Browser, alice: User, bob: User, broker: FakeBroker, rules: Any
) -> None:
    rules(share_percent=50)
    start = tomorrow(0)
    several: tuple[tuple[User, int, dict[str, Any]], ...] = (
        (alice, 12, {}),
        (bob, 6, {"node_names": ["n2"]}),
        (bob, 3, {"users": ["alice"], "gpus_per_node": 2}),
        (bob, 24, {"state": BookingState.ENDED}),
    )
    for owner, hours, more in several:
        make(owner, start=start, end=start + timedelta(hours=hours), **more)
    broker.kept["maint"] = Reservation(
        name="maint", start=start, end=start + timedelta(hours=12), node_names=["n2"], maintenance=True
    )
    day = f"{start:%Y-%m-%d}"
    page = BeautifulSoup(text(browser.get("/bookings/share/", {"view": "day", "day": day})), "html.parser")
    spec = json.loads(str(page.find("carme-chart")["data-chart"]))  # type: ignore[index]
    whole = (tomorrow(0) + timedelta(days=1) - start) / timedelta(hours=1) * 8
    booked = {"mine": 48, "shared with me": 6, "others": 24, "maintenance": 48}
    shown = {one["name"]: one["values"] for one in spec["series"]}
    assert shown == {name: [round(100 * used / whole, 1)] for name, used in booked.items()}
    assert spec["line"] == {"name": "may be booked at once", "value": 50.0} and spec["most"] == 100
    assert "/bookings/share/?view=week" in browser.get("/bookings/").content.decode()
