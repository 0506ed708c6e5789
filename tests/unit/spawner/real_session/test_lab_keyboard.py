"""What Carme adds to JupyterLab's page, by keyboard alone, in Chromium on a real single-user server."""

from datetime import UTC, datetime, timedelta

import pytest
from playwright.async_api import Locator, Page, expect

from ..conftest import eventually
from .front import BASE, Front, hurry, launcher_has_focus

pytestmark = pytest.mark.asyncio(loop_scope="package")

#: More than a page has places for the focus.
MOST_TABS = 200
USE = """<section id="use" class="use" aria-labelledby="use-heading">
<h2 id="use-heading">Resource usage</h2><p>GPUs 12 % used</p></section>"""


async def tab_to(page: Page, place: Locator) -> None:
    """Press Tab until an element has the focus, which is seen."""
    await expect(place).to_be_visible()
    for _ in range(MOST_TABS):
        await page.keyboard.press("Tab")
        if await place.evaluate("element => element === document.activeElement"):
            await expect(place).to_have_css("outline-style", "solid")
            return
    raise AssertionError(f"Tab does not lead to it: {place}")


async def test_tiles_panel_and_time_are_used_by_keyboard(front: Front, page: Page) -> None:
    ends = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()
    front.status = {"ends": ends, "stops_idle": None, "extend": True, "warned": [], "warned_idle": []}
    front.status |= {"job": 123}
    front.pages["/jobs/123/use/"] = USE
    front.held = f"GET {BASE}api/contents"  # on a busy machine the launcher comes later than all else
    await page.goto(f"{front.url}{BASE}lab?reset")
    # The session's time is shown after that, once JupyterLab has restored its page.
    await expect(page.locator("body[data-jp-theme-name]")).to_be_attached()
    await eventually(
        lambda: any("/api/contents" in path for path in front.questions), "the list is requested"
    )
    front.go_on.set()
    await launcher_has_focus(page)

    # The time: more of it and the end. Each dialog gives the focus back.
    time = page.locator("#carme-session-time button")
    await tab_to(page, time)
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog").filter(has_text="More time for this session")
    await expect(dialog.get_by_role("spinbutton")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await expect(time).to_be_focused()
    await page.keyboard.press("Enter")
    await tab_to(page, dialog.get_by_role("button", name="Stop This Session"))
    await page.keyboard.press("Enter")
    stop = page.get_by_role("dialog").filter(has_text="Stop this session?")
    await expect(stop).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(stop).to_have_count(0)
    await expect(time).to_be_focused()

    # The launcher's tiles.
    tile = page.locator('.jp-LauncherCard[data-category="Session"]')
    portal = tile.filter(has_text="Portal")
    await tab_to(page, portal)
    async with page.context.expect_page() as opened:
        await page.keyboard.press("Enter")
    portal_page = await opened.value
    await eventually(lambda: front.questions["/sessions/s1/"], "the portal's page of the session is opened")
    await portal_page.close()
    await tab_to(page, tile.filter(has_text="Examples"))
    await page.keyboard.press("Enter")
    await expect(page.locator(".carme-examples")).to_be_visible()

    # The panel, from the list of commands.
    await page.keyboard.press("Control+Shift+C")
    await expect(page.locator(".lm-CommandPalette input")).to_be_focused()
    await page.keyboard.type("Show What This Session Uses")
    await page.keyboard.press("Enter")
    panel = page.get_by_role("region", name="What this session uses, and advice")
    await expect(panel).to_contain_text("GPUs 12 % used")
    await expect(panel).to_be_focused()


async def test_the_dialog_of_the_end_is_used_by_keyboard(front: Front, page: Page) -> None:
    await hurry(page)
    await page.goto(f"{front.url}{BASE}lab?reset")
    await launcher_has_focus(page)
    front.portal_reply = {"over": True, "state": "ended", "sentence": "You stopped this session."}
    front.portal_reply |= {"token": "a token", "fresh": "s2"}
    await front.lose_server()
    dialog = page.get_by_role("dialog").filter(has_text="This session has ended")
    await expect(dialog.get_by_role("button", name="Stay Here")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await tab_to(page, page.locator("#carme-session-time button"))
    await page.keyboard.press("Enter")
    await tab_to(page, dialog.get_by_role("button", name="Start Again"))
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/sessions/s2/")
    assert front.sent == {"csrfmiddlewaretoken": "a token", "name": "s2", "then": "open"}
