"""Bookings in one journey: drawn in the calendar, kept by Slurm, a session by itself, the rest given back."""

import re
import time
from collections.abc import Callable, Iterator

import pytest
from browser.conftest import log_in
from playwright.sync_api import Page, expect

from demo_site import DemoSite, wait_until

TOML = "/etc/carme/carme.toml"
UNITS = ("carme-portal", "carme-sync", "carme-worker", "carme-beat")
GRACE_MINUTES = 1


@pytest.fixture
def impatient(demo: DemoSite) -> Iterator[None]:
    """Release unused bookings after a minute instead of a quarter of an hour."""
    demo.run("head", "cp", "--preserve=all", TOML, f"{TOML}.kept")
    try:
        demo.run("head", "sed", "-i", f"/^\\[bookings\\]/a grace_minutes = {GRACE_MINUTES}", TOML)
        _restart(demo)
        yield
    finally:
        demo.run("head", "mv", f"{TOML}.kept", TOML)
        _restart(demo)


def _restart(demo: DemoSite) -> None:
    here = [unit for unit in UNITS if demo.run("head", "systemctl", "cat", unit, check=False).returncode == 0]
    demo.run("head", "systemctl", "restart", *here)
    answers = ("curl", "--silent", "--output", "/dev/null", "http://127.0.0.1:8100/accounts/login/")
    wait_until("the portal answers", lambda: demo.run("head", *answers, check=False).returncode == 0)


def reservation_of(demo: DemoSite, name: str) -> str:
    """Slurm's line on a reservation; empty when there is none."""
    shown = demo.run("head", "scontrol", "--oneliner", "show", "reservation", name, check=False).stdout
    return shown if f"ReservationName={name} " in shown else ""


def choose(page: Page, demo: DemoSite, title: str, keep: Callable[[str], None] | None = None) -> str:
    """Choose an hour in today's calendar by the mouse, let it begin now, and book it; the booking's name."""
    page.goto("/bookings/?view=day")
    free = page.locator("#calendar tbody tr").first.locator("a.free")
    free.nth(0).hover()
    page.mouse.down()
    free.nth(1).hover()
    if keep:
        keep("booking-1-drawn-in-the-calendar")
    page.mouse.up()
    expect(page.get_by_label("Duration")).to_have_value("1h")
    seconds = 60 - int(demo.run("head", "date", "+%S").stdout)
    if seconds < 15:
        time.sleep(seconds)
    day, clock = demo.run("head", "date", "--utc", "+%Y-%m-%d %H:%M").stdout.split()
    page.locator("#id_date").fill(day)
    page.get_by_label("Start time").fill(clock)
    page.get_by_label("Title").fill(title)
    page.get_by_role("button", name="Book", exact=True).click()
    expect(page.locator(".status .state").first).to_have_text(re.compile("Booked|Running now"))
    return re.findall(r"carme-[0-9a-f]{12}", page.url)[0]


def costs(page: Page) -> float:
    """The GPU-hours that the booking's page shows."""
    text = page.locator("dt", has_text="Costs").locator("xpath=following-sibling::dd[1]").inner_text()
    found = re.search(r"[\d.]+", text)
    assert found, text
    return float(found[0])


def again_until(page: Page, address: str, what: str, holds: Callable[[], bool], timeout: float) -> None:
    """Reload a page until a condition holds; pages of bookings show the state at their loading."""

    def reload() -> bool:
        page.goto(address)
        return holds()

    wait_until(what, reload, timeout)


def delete(page: Page, name: str) -> None:
    page.goto(f"/bookings/{name}/delete/")
    page.get_by_role("button", name="Delete the booking").click()


@pytest.mark.usefixtures("impatient")
def test_a_booking_becomes_a_reservation_in_which_a_session_runs(
    page: Page, demo: DemoSite, keep: Callable[[str], None]
) -> None:
    log_in(page, demo)
    used = choose(page, demo, "Training of today", keep)
    whole = costs(page)
    assert whole == demo.settings.gpus
    try:
        line = wait_until(
            "Slurm keeps it",
            lambda: "State=ACTIVE" in reservation_of(demo, used) and reservation_of(demo, used),
        )
        assert "Users=user1 " in line
        page.locator("#image").select_option("base")
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.get_by_role("status").first).to_be_visible()
        keep("booking-2-a-session-is-planned")

        session = page.get_by_role("heading", name="Session", exact=True)
        address = f"/bookings/{used}/"
        again_until(page, address, "its session has started by itself", lambda: session.count() > 0, 60)
        keep("booking-3-its-session-has-started")
        page.locator("section", has=session).get_by_role("link").click()
        expect(page.locator(".status .state").first).to_have_text("Ready")
        running = demo.run("head", "squeue", "--noheader", "--user=user1", "--format=%v").stdout.split()
        assert running == [used]
        keep("booking-4-the-session-is-ready")
    finally:
        demo.end_all_jobs()
        delete(page, used)
    expect(page.locator(".status .state").first).to_have_text("Deleted")
    # What it did not use is credited: of an hour some minutes are left.
    assert costs(page) < whole / 4
    keep("booking-5-the-rest-is-credited")
    wait_until("its node is free for others", lambda: not reservation_of(demo, used))

    unused = choose(page, demo, "Forgotten")
    assert costs(page) == whole
    try:
        wait_until("Slurm keeps it", lambda: reservation_of(demo, unused))
        over = page.locator(".status .state", has_text="iven back")
        limit = 60 * GRACE_MINUTES + 90
        address = f"/bookings/{unused}/"
        again_until(page, address, "it is given back", lambda: over.count() > 0, limit)
        assert costs(page) < whole / 4
        keep("booking-6-given-back-as-nothing-ran-in-it")
        wait_until("its node is free for others", lambda: not reservation_of(demo, unused))
        page.goto("/bookings/")
        keep("booking-7-my-bookings")
    finally:
        if reservation_of(demo, unused):
            delete(page, unused)
