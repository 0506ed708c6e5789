"""A booking from the calendar to Slurm and back: reserved, used by its owner, restored when lost, deleted."""

import re
from collections.abc import Iterator

import httpx
import pytest
from portal_bookings import booked, confirm, send

from carme.validation import Visitor
from demo_site import DemoSite, wait_until
from patience import HANG


def reservation_of(demo: DemoSite, name: str) -> str:
    """Slurm's line on the reservation; empty when there is none."""
    shown = demo.run("head", "scontrol", "--oneliner", "show", "reservation", name, check=False).stdout
    return shown if f"ReservationName={name} " in shown else ""


def session_of(visitor: Visitor, name: str) -> str:
    """The session that a booking has started automatically; empty until then."""
    page = visitor.fetch(f"{visitor.url}bookings/{name}/")
    found = re.search(r'href="/sessions/(s[a-z0-9]{8})/"', page.text)
    return found[1] if found else ""


def send_now(demo: DemoSite, visitor: Visitor) -> httpx.Response:
    """Send the form for a booking that begins in this minute; repeat it if the minute has ended meanwhile."""

    def answer() -> httpx.Response | None:
        day, clock = demo.run("head", "date", "--utc", "+%Y-%m-%d %H:%M").stdout.split()
        answer = send(visitor, date=day, time=clock)
        return None if "cannot begin in the past" in answer.text else answer

    return wait_until("a form was sent within a minute", answer)


@pytest.fixture
def no_booking_left(demo: DemoSite) -> Iterator[None]:
    yield
    demo.end_all_jobs()
    for name in re.findall(
        r"ReservationName=(carme-[0-9a-f]{12}) ",
        demo.run("head", "scontrol", "-o", "show", "reservation").stdout,
    ):
        for user in ("user1", "user2"):
            with demo.visitor(user) as visitor:
                if visitor.fetch(f"{visitor.url}bookings/{name}/delete/").status_code == 200:
                    confirm(visitor, f"bookings/{name}/delete/")
    wait_until(
        "no booking is left",
        lambda: "carme-" not in demo.run("head", "scontrol", "show", "reservation").stdout,
    )


@pytest.mark.alone
@pytest.mark.usefixtures("no_booking_left")
def test_a_booking_is_its_owners_made_again_when_lost_and_given_back(demo: DemoSite) -> None:
    with demo.visitor("user1") as owner, demo.visitor("user2") as visitor:
        name = booked(send_now(demo, owner))
        line = wait_until(
            "it has begun",
            lambda: "State=ACTIVE" in reservation_of(demo, name) and reservation_of(demo, name),
        )
        assert "Users=user1 " in line and "NO_HOLD_JOBS_AFTER" in line
        node = re.search(r" Nodes=(\S+)", line)
        assert node is not None

        # Half of the demo's GPUs is one node: a second booking is refused, with the nearest free times.
        answer = send_now(demo, visitor)
        assert answer.status_code == 422 and "may be booked at a time" in answer.text
        assert 'name="slot"' in answer.text
        assert visitor.fetch(f"{visitor.url}bookings/{name}/").status_code == 404

        # Nobody else's jobs start on that node, the owner's do.
        refused = demo.carme(
            "submit", "--reservation", name, "--time", "5m", "--", "hostname", user="user2", check=False
        )
        assert refused.returncode == 1 and "You may not use this booking" in refused.stderr

        # A session starts in it automatically.
        page = owner.fetch(f"{owner.url}bookings/{name}/")
        owner.send(page, owner.form(page, "image"), {"image": "base"})
        session = wait_until("the booking's session is there", lambda: session_of(owner, name))
        owner.wait(session, "ready", timeout=HANG)
        running = demo.run("head", "squeue", "--noheader", "--user=user1", "--format=%v %N").stdout.split()
        assert running == [name, node[1]]
        owner.stop(session)
        owner.wait(session, "ended", timeout=HANG)

        # An administrator's mistake: within half a minute Slurm keeps it again.
        demo.run("head", "scontrol", "delete", f"ReservationName={name}")
        wait_until("Slurm keeps the booking again", lambda: reservation_of(demo, name))

        confirm(owner, f"bookings/{name}/delete/")
        wait_until("the nodes are given back", lambda: not reservation_of(demo, name))
    actions = demo.run("head", "cat", "/var/log/carme/audit.jsonl").stdout
    assert f'"action": "reserve", "user": "user1", "result": "ok", "name": "{name}"' in actions
    assert f'"action": "release", "user": "user1", "result": "ok", "name": "{name}"' in actions
