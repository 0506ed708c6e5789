"""How the extensions of JupyterLab's page ask again and again: one function for all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route

import carme_spawner.singleuser

pytestmark = pytest.mark.asyncio(loop_scope="package")

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


async def test_rounds_come_in_time_where_wanted_until_their_end(fresh_page: Page) -> None:
    async def rounds() -> int:
        return await fresh_page.evaluate("window.rounds")

    await fresh_page.route("**/", lambda route: route.fulfill(body="<p>x", content_type="text/html"))
    await fresh_page.route(
        "**/shared.js",
        lambda route: route.fulfill(body=SHARED.read_text(), content_type="text/javascript"),
    )
    await fresh_page.clock.install()
    await fresh_page.goto("http://localhost/")
    # Only run_for passes time from here on.
    await fresh_page.clock.pause_at(await fresh_page.evaluate("Date.now() + 60000"))
    await fresh_page.evaluate(START)
    await fresh_page.clock.run_for(3500)
    assert await rounds() == 3, "none waits for the answer of the one before"
    await fresh_page.evaluate("window.wanted = false")
    await fresh_page.clock.run_for(3000)
    await fresh_page.evaluate(COME_BACK)
    assert await rounds() == 3
    await fresh_page.evaluate("window.wanted = true")
    await fresh_page.evaluate(COME_BACK)
    assert await rounds() == 4, "at once, and not at the next round"
    await fresh_page.evaluate("window.end()")
    await fresh_page.clock.run_for(3000)
    await fresh_page.evaluate(COME_BACK)
    assert await rounds() == 4


@pytest.mark.parametrize("name", ["carme-session", "carme-home", "carme-use", "carme-notebook"])
async def test_extensions_have_no_polling_of_their_own(name: str) -> None:
    scripts = [file for file in EXTENSIONS.glob(f"{name}/static/*.js") if file != SHARED]
    assert scripts and not [file.name for file in scripts if "setInterval" in file.read_text()]


#: The session on the portal, as the page knows it; it imports the other one.
PORTAL = SHARED.with_name("portal.js")
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


async def test_the_end_of_a_session_is_waited_for_until_the_portal_says_so(page: Page) -> None:
    await page.route("**/", lambda route: route.fulfill(body=CONFIG, content_type="text/html"))
    for script in (SHARED, PORTAL):
        await page.route(f"**/{script.name}", fulfilled(script))
    await page.goto("http://localhost/")
    assert await page.evaluate(WAIT) == {
        "seen": [None, {"over": False}],
        "ended": "Ended.",
        "gaveUp": False,
        "known": "Known.",
        "rest": 0,
    }


def fulfilled(script: Path) -> Callable[[Route], Any]:
    """What answers a request for a script of the session's."""
    return lambda route: route.fulfill(body=script.read_text(), content_type="text/javascript")


async def test_session_js_asks_the_portal_by_that_function_alone() -> None:
    scripts = {file.name: file.read_text() for file in (PORTAL, PORTAL.with_name("session.js"))}
    assert "portal.ask(" not in scripts["session.js"]
    assert scripts["portal.js"].count("while (") == 1
