"""The calendar in Chromium: chosen by keyboard or drawn with the mouse, booked, seen, changed, deleted."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from playwright.sync_api import Page, expect

from demo_site import DemoSite, wait_until

from .conftest import log_in

# Far enough ahead that neither the running jobs of other tests nor the time of day matter.
DAY = f"{datetime.now(UTC) + timedelta(days=3):%Y-%m-%d}"


def reservation_of(demo: DemoSite, name: str) -> str:
    """Slurm's line on a reservation, or that there is none."""
    done = demo.run("head", "scontrol", "--oneliner", "show", "reservation", name, check=False)
    return done.stdout + done.stderr


def test_a_booking_is_made_by_keyboard_seen_in_the_calendar_and_deleted(
    page: Page, demo: DemoSite, keep_screenshots: Callable[[str], None]
) -> None:
    log_in(page, demo)
    page.get_by_role("link", name="Bookings").click()
    expect(page.locator("#calendar")).to_be_visible()
    page.goto(f"/bookings/?view=day&day={DAY}")
    cells = page.locator("#calendar tbody tr").first.locator("a.free")
    cells.nth(20).focus()
    page.keyboard.press("ArrowRight")
    expect(cells.nth(21)).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
    expect(page.locator("#calendar a.chosen")).to_have_count(4)
    page.keyboard.press("Enter")
    expect(page.get_by_label("Duration")).to_have_value("2h")
    expect(page.get_by_label("Start time")).to_have_value("10:30")
    page.get_by_label("Title").fill("Browser test")
    page.get_by_role("button", name="Book", exact=True).click()
    expect(page.locator(".status .state")).to_have_text("Booked")
    name = re.findall(r"carme-[0-9a-f]{12}", page.url)[0]
    try:
        assert f"ReservationName={name} " in reservation_of(demo, name)
        page.goto(f"/bookings/?view=day&day={DAY}")
        expect(page.locator("#calendar").get_by_role("link", name="Browser test").first).to_be_visible()
        keep_screenshots("bookings")

        # Drawn over two free cells of the other node, it is refused: half of the demo is booked already.
        row = page.locator("#calendar tbody tr").filter(has_not=page.get_by_role("link", name="Browser test"))
        free = row.locator("a.free")
        free.nth(22).scroll_into_view_if_needed()
        free.nth(22).hover()
        page.mouse.down()
        free.nth(23).hover()
        page.mouse.up()
        expect(page.get_by_label("Duration")).to_have_value("1h")
        page.get_by_role("button", name="Book", exact=True).click()
        expect(page.locator(".errorlist")).to_contain_text("may be booked at a time")
        expect(page.locator("button[name=slot]").first).to_be_visible()
        keep_screenshots("bookings-conflict")
    finally:
        page.goto(f"/bookings/{name}/delete/")
        page.get_by_role("button", name="Delete the booking").click()
    expect(page.locator(".status .state")).to_have_text("Deleted")
    wait_until("the nodes are given back", lambda: "not found" in reservation_of(demo, name))
