"""How JupyterLab's extensions ask again and again, and wait for a session's end: one function for each."""

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Page, Route

import carme_spawner.singleuser

from .test_lab_page import chromium, page

__all__ = ["chromium", "page"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXTENSIONS = Path(carme_spawner.singleuser.__file__).parent / "labextensions"
SESSION = EXTENSIONS / "carme-session/static"
SHARED = SESSION / "shared.js"
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

#: Waits twice for a session's end: until the portal says so, and until the caller gives up.
WAIT = """async () => {
    const { untilOver } = await import('/portal.js');
    const going = { over: false };
    const answers = [null, going, { over: true, sentence: 'Ended.' }, going, going];
    window.fetch = async () => {
        const answer = answers.shift();
        return { ok: answer !== null, json: async () => answer };
    };
    const seen = [];
    const ended = await untilOver(async answer => seen.push(answer));
    let left = 2;
    const gaveUp = await untilOver(() => --left > 0);
    const known = await untilOver(() => false, { over: true, sentence: 'Known.' });
    return { seen, ended: ended.sentence, gaveUp: gaveUp.over, known: known.sentence, rest: answers.length };
}"""
#: The part of JupyterLab's page that says where the session's server is.
CONFIG = """<script id="jupyter-config-data" type="application/json">
    {"baseUrl": "/jupyter/user/ada/s1/"}</script>"""


async def serve(page: Page, file: Path) -> None:
    """Have the page's server send one of the session's scripts."""
    script = await asyncio.to_thread(file.read_text)

    async def answer(route: Route) -> None:
        await route.fulfill(body=script, content_type="text/javascript")

    await page.route(f"**/{file.name}", answer)


async def test_rounds_come_in_time_where_wanted_until_their_end(page: Page) -> None:
    async def rounds() -> int:
        return await page.evaluate("window.rounds")

    await page.route("**/", lambda route: route.fulfill(body="<p>x", content_type="text/html"))
    await serve(page, SHARED)
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


async def test_the_end_of_a_session_is_waited_for_until_the_portal_says_so(page: Page) -> None:
    await page.route("**/", lambda route: route.fulfill(body=CONFIG, content_type="text/html"))
    for file in (SHARED, SESSION / "portal.js"):
        await serve(page, file)
    await page.goto("http://localhost/")
    assert await page.evaluate(WAIT) == {
        "seen": [None, {"over": False}],
        "ended": "Ended.",
        "gaveUp": False,
        "known": "Known.",
        "rest": 0,
    }


async def test_session_js_asks_the_portal_by_that_function_alone() -> None:
    assert "portal.ask(" not in (SESSION / "session.js").read_text()
    assert (SESSION / "portal.js").read_text().count("while (") == 1
