"""What marks mean, by pointer, keyboard and touch: the calendar of free GPUs, and that of bookings."""

import re
from datetime import timedelta

import pytest
from axe_rules import EVERY
from django.utils import timezone
from playwright.sync_api import Page, expect

from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.projects.models import Membership, Project

from ..fake_broker import FakeBroker, make_job
from .conftest import sign_in
from .test_accessibility import violations

pytestmark = pytest.mark.django_db(transaction=True)

#: The page's live part comes once more.
SENT_ANEW = """() => new Promise((done) => {
    document.addEventListener("htmx:after:swap", () => setTimeout(done), { once: true });
    document.body.dispatchEvent(new Event("update"));
})"""
#: The focused cell's name and tabindex, and how many cells of its table Tab reaches.
REACHED = """() => {
    const cell = document.activeElement;
    const reached = cell.closest("table")?.querySelectorAll("td[tabindex='0']").length;
    return [cell.ariaLabel, cell.tabIndex, reached];
}"""
#: The browser has drawn the page, and so sent the events of what has changed below the pointer.
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def test_free_gpus_are_read_by_pointer_and_arrow_keys(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.goto("/")
    table, tip = page.locator("table.free-days"), page.locator(".tip")
    cells = table.locator("td[tabindex]")
    expect(table.locator("td[tabindex='0']")).to_have_count(1)
    cells.first.focus()
    words = cells.first.get_attribute("aria-label") or ""
    assert re.search(r"\d of \d+ free$", words)
    expect(tip).to_have_text(words)
    page.keyboard.press("ArrowDown")
    expect(tip).not_to_have_text(words)
    here = page.evaluate("document.activeElement.ariaLabel")
    expect(tip).to_have_text(here)
    assert violations(page, EVERY) == []
    # What the page is sent anew leaves the cell that was reached, and its tip has the new words.
    page.evaluate("""() => {
        const cell = document.activeElement;
        cell.dataset.tip = "old";
        cell.blur();
        cell.focus();
    }""")
    page.evaluate(SENT_ANEW)
    expect(tip).to_have_text(here)
    assert page.evaluate(REACHED) == [here, 0, 1]
    page.keyboard.press("Control+ArrowUp")
    assert page.evaluate(REACHED) == [here, 0, 1]
    page.keyboard.press("Escape")
    expect(tip).to_have_count(0)
    # It stays hidden while the focus is there, wherever the pointer goes.
    page.mouse.move(2, 2)
    page.mouse.move(4, 4)
    page.evaluate(FRAMES)
    expect(tip).to_have_count(0)
    page.keyboard.press("ArrowUp")
    expect(tip).to_have_text(words)
    page.keyboard.press("ArrowDown")
    expect(tip).to_have_text(here)
    last = cells.last
    last.hover()
    expect(tip).to_have_text(last.get_attribute("aria-label") or "")


def test_the_calendar_says_who_has_a_node_and_by_what_right(
    page: Page, sample_data: None, broker: FakeBroker, bob: User, alice: User
) -> None:
    now = timezone.now().replace(second=0, microsecond=0)
    broker.put(make_job(9, user="carol", node_list="n1", started=now - timedelta(hours=1)))
    project = Project.objects.get(name="vision")
    assert Membership.objects.filter(project=project, user=alice).exists()
    Booking.objects.all().delete()
    for hours, owner, values in (
        (30, alice, {"title": "Mine"}),
        (36, bob, {"title": "Ours", "project": project}),
        (42, bob, {"title": "Lent", "users": ["alice"]}),
        (48, bob, {"title": "Secret"}),
    ):
        Booking.objects.create(
            owner=owner, partition="gpu", gpu_type="a100", gpus_per_node=4, node_names=["n1"], reserved=now,
            start=now + timedelta(hours=hours), end=now + timedelta(hours=hours + 1), state="approved",
            **values,
        )  # fmt: skip
    sign_in(page)
    page.goto("/bookings/")
    entries, tip = page.locator("#calendar .item"), page.locator(".tip")
    for name, right in (
        ("Mine", "your booking"),
        ("Ours", "project Computer vision"),
        ("Lent", "shared by bob"),
    ):
        entries.filter(has_text=name).hover()
        expect(tip).to_have_text(re.compile(rf"^{name}, .+, {right}$"))
    assert "Secret" not in page.content()
    # By arrow keys also where there is no page to go to.
    entries.filter(has_text="Lent").focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
        if page.evaluate("document.activeElement.matches('span.item')"):
            break
    expect(tip).to_have_text(re.compile("^Booked, "))
    expect(page.locator("#calendar [tabindex='0']")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(tip).to_have_count(0)
    page.mouse.move(2, 2)
    page.evaluate(FRAMES)
    expect(tip).to_have_count(0)
    assert violations(page, EVERY) == []
