"""What Carme adds to JupyterLab's page, by WCAG 2.2 AA, light and dark, in Chromium on a real server.

JupyterLab's own parts are its makers': axe looks at Carme's tiles, gallery, panel, time and dialogs alone.
"""

import json
from datetime import UTC, datetime, timedelta

import pytest
from axe_rules import AXE, EVERY, FIND, readable
from playwright.async_api import Page, expect

from patience import HANG

from .front import BASE, Front, has_loaded, hurry

pytestmark = pytest.mark.asyncio(loop_scope="package")

#: Of the portal's part that the panel shows, what has no script.
USE = """<section id="use" class="use" lang="en" aria-labelledby="use-heading">
<h2 id="use-heading">Resource usage</h2>
<h3>GPUs</h3>
<p class="legend" aria-hidden="true"><span><span class="stroke stroke-1"></span> computes</span>
<span><span class="stroke stroke-2"></span> waits</span></p>
<ul class="multiples" aria-label="GPUs"><li><span>Rank 0</span></li><li><span>Rank 1</span></li></ul>
<details open><summary>As a table</summary><table>
<thead><tr><th scope="col">On average</th><th scope="col">computes</th></tr></thead>
<tbody><tr><th scope="row">Rank 0</th><td>12 %</td></tr></tbody></table></details>
<table><tr><th scope="row">GPUs</th>
<td><meter max="1" value="0.12" aria-hidden="true"></meter> 12 % used</td></tr></table>
<h3>Advice</h3><ul><li>Read data with more workers: <pre>DataLoader(num_workers=4)</pre></li></ul>
</section>"""
HOME = {
    "apps": [{"name": "tensorboard", "title": "TensorBoard", "url": f"{BASE}tensorboard/"}],
    "examples": [{"name": "first", "title": "First steps", "description": "What this session has."}],
}
#: Stores the dark theme as JupyterLab's menu does.
CHOOSE_DARK = """path => fetch(`${path}lab/api/settings/@jupyterlab/apputils-extension:themes`, {
    method: 'PUT',
    headers: { 'X-XSRFToken': document.cookie.match(/\\b_xsrf=([^;]*)/)?.[1] },
    body: JSON.stringify({ raw: JSON.stringify({ theme: 'JupyterLab Dark' }) }),
}).then(response => response.status)"""
FAULT = """document.querySelector('#carme-use').insertAdjacentHTML('beforeend', '<img id=fault src=x>')"""


async def wrong(page: Page, *places: str) -> list[str]:
    """What axe finds in parts of the page, once each of them is there."""
    for place in places:
        await expect(page.locator(place).first).to_be_visible()
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE)
    return [f"{places}: {problem}" for problem in readable(await page.evaluate(FIND, [EVERY, [*places]]))]


async def wrong_while_it_runs(page: Page) -> list[str]:
    """What is wrong with tiles, gallery, panel, time and the dialogs of a session that runs."""
    session, examples = (f'.jp-LauncherCard[data-category="{name}"]' for name in ("Session", "Examples"))
    found = await wrong(page, session, examples, "#carme-session-time")

    await page.locator("#carme-session-time button").click()
    dialog = page.get_by_role("dialog", name="This session", exact=True)
    await expect(dialog).to_be_visible()
    found += await wrong(page, ".jp-Dialog")
    await dialog.get_by_role("button", name="Stop This Session").click()
    stop = page.get_by_role("dialog", name="Stop this session?")
    await expect(stop).to_be_visible()
    found += await wrong(page, ".jp-Dialog")
    await page.keyboard.press("Escape")
    await expect(stop).to_have_count(0)

    await page.locator(session).filter(has_text="Examples").click()
    found += await wrong(page, ".carme-examples")

    await page.keyboard.press("Control+Shift+C")
    await expect(page.locator(".lm-CommandPalette input")).to_be_focused()
    await page.keyboard.type("Show What This Session Uses")
    await page.keyboard.press("Enter")
    await expect(page.locator("#carme-use")).to_contain_text("12 % used")
    found += await wrong(page, "#carme-use")
    await page.evaluate(FAULT)
    assert any("image-alt" in problem for problem in await wrong(page, "#carme-use")), (
        "what is wrong is found"
    )
    await page.evaluate("document.querySelector('#fault').remove()")
    return found


async def wrong_at_the_end(page: Page, front: Front) -> list[str]:
    """What is wrong with the dialog of a session that has ended."""
    front.portal_reply = {"over": True, "state": "ended", "sentence": "You stopped this session."}
    front.portal_reply |= {"token": "a token", "fresh": "s2"}
    front.status = None
    await front.lose_server()
    dialog = page.get_by_role("dialog", name="This session has ended", exact=True)
    await expect(dialog).to_contain_text("You stopped this session.")
    found = await wrong(page, ".jp-Dialog")
    await dialog.get_by_role("button", name="Stay Here").click()
    await expect(dialog).to_have_count(0)
    return found + await wrong(page, "#carme-session-time")


@pytest.mark.timeout(5 * HANG)
async def test_axe_finds_nothing_in_carmes_parts_of_jupyterlab(front: Front, page: Page) -> None:
    ends = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()
    status: dict[str, object] = {"ends": ends, "stops_idle": None, "extend": True, "job": 123}
    status |= {"warned": [], "warned_idle": []}
    front.pages = {"/jobs/123/use/": USE, f"{BASE}carme/home": json.dumps(HOME)}
    found: list[str] = []
    await hurry(page)
    for theme in ("light", "dark"):
        front.status, front.portal_reply, front.gone = status, None, 0
        await page.goto(f"{front.url}{BASE}lab?reset")
        await has_loaded(page)
        is_light = "true" if theme == "light" else "false"
        await expect(page.locator("body")).to_have_attribute("data-jp-theme-light", is_light)
        found += [f"{theme}: {problem}" for problem in await wrong_while_it_runs(page)]
        # For the next load: after the end no request leaves the page.
        assert await page.evaluate(CHOOSE_DARK, BASE) == 204
        found += [f"{theme}: {problem}" for problem in await wrong_at_the_end(page, front)]
    assert not found, "\n".join(found)
