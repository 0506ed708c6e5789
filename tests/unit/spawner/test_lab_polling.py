"""How the extensions of JupyterLab's page ask again and again: one function for all of them."""

from pathlib import Path

import pytest
from playwright.async_api import Page

import carme_spawner.singleuser

from .test_lab_page import chromium, page

__all__ = ["chromium", "page"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXTENSIONS = Path(carme_spawner.singleuser.__file__).parent / "labextensions"
SHARED = EXTENSIONS / "carme-session/static/shared.js"
#: Counts rounds whose answers never come.
START = """async () => {
    const { poll } = await import('/shared.js');
    Object.assign(window, { rounds: 0, wanted: true });
    const round = () => {
        window.rounds += 1;
        return new Promise(() => {});
    };
    window.end = poll(round, 1000, () => window.wanted);
}"""
COME_BACK = "document.dispatchEvent(new Event('visibilitychange'))"


async def test_rounds_come_in_time_where_wanted_until_their_end(page: Page) -> None:
    async def rounds() -> int:
        return await page.evaluate("window.rounds")

    await page.route("**/", lambda route: route.fulfill(body="<p>x", content_type="text/html"))
    await page.route(
        "**/shared.js",
        lambda route: route.fulfill(body=SHARED.read_text(), content_type="text/javascript"),
    )
    await page.clock.install()
    await page.goto("http://localhost/")
    # Only run_for passes time from here on.
    await page.clock.pause_at(await page.evaluate("Date.now() + 60000"))
    await page.evaluate(START)
    await page.clock.run_for(3500)
    assert await rounds() == 3, "none waits for the answer of the one before"
    await page.evaluate("window.wanted = false")
    await page.clock.run_for(3000)
    await page.evaluate(COME_BACK)
    assert await rounds() == 3
    await page.evaluate("window.wanted = true")
    await page.evaluate(COME_BACK)
    assert await rounds() == 4, "at once, and not at the next round"
    await page.evaluate("window.end()")
    await page.clock.run_for(3000)
    await page.evaluate(COME_BACK)
    assert await rounds() == 4


@pytest.mark.parametrize("name", ["carme-session", "carme-home", "carme-use", "carme-notebook"])
async def test_extensions_have_no_polling_of_their_own(name: str) -> None:
    scripts = [file for file in EXTENSIONS.glob(f"{name}/static/*.js") if file != SHARED]
    assert scripts and not [file.name for file in scripts if "setInterval" in file.read_text()]
