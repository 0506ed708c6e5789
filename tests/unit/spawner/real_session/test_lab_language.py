"""JupyterLab in the language of the portal's pages, in Chromium, on a real single-user server."""

import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from carme.errors import InvalidRequest
from carme.jobs import MAXIMUM_MINUTES
from carme.translation import message
from carme_spawner.singleuser import language

from ..conftest import Site, eventually
from ..test_singleuser import COMMAND
from .front import Front, Gate

EXTENSIONS = Path(language.__file__).with_name("labextensions")
PLATFORM = Path(__file__).resolve().parents[4] / "containers/images/platform/install"
#: What JupyterLab keeps in the home.
LAB = ".jupyter/lab"
#: A sentence in quotes of either kind.
QUOTED = r"""(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")"""
#: JupyterLab's own words: a menu, a button of a dialog; Carme's: the tiles, the time, the dialog's title.
WORDS = {
    "de": ("Datei", "Abbrechen", "Sitzung", r"noch 1 h \d+ min", "Diese Sitzung"),
    "en": ("File", "Cancel", "Session", r"1 h \d+ min left", "This session"),
}
#: What the broker says when more time is requested, and how requests are refused: by the broker, by the
#: server itself, where there is no example, and by the page of an app that the image lacks.
BEGUN = InvalidRequest(message("The booking has begun, so its start cannot change any more."))
REFUSALS = {
    "de": (
        "Die Buchung hat begonnen",
        "Nennen Sie die Minuten",
        "höchstens 527040 weitere Minuten",
        "Dieses Image hat kein Beispiel 'none'.",
        '<html lang="de">',
    ),
    "en": (
        "The booking has begun",
        "Give the number of minutes",
        "at most 527040 more minutes",
        "This image has no example 'none'.",
        '<html lang="en">',
    ),
}
#: Stores a language as JupyterLab's menu does.
CHOOSE = """([path, locale]) => fetch(`${path}lab/api/settings/@jupyterlab/translation-extension:plugin`, {
    method: 'PUT',
    headers: { 'X-XSRFToken': document.cookie.match(/\\b_xsrf=([^;]*)/)?.[1] },
    body: JSON.stringify({ raw: JSON.stringify({ locale }) }),
}).then(response => response.status)"""


def test_every_sentence_of_the_extensions_has_a_german_one() -> None:
    text = "".join(file.read_text() for file in EXTENSIONS.glob("*/static/*.js"))
    shown = {first or second for first, second in re.findall(rf"\bsay\(\s*{QUOTED}", text)}
    assert "All documents are saved." in shown
    german = (EXTENSIONS / "carme-session/static/german.js").read_text()
    table = rf"^  (?:(\w+)|{QUOTED}):\s+'(.+)',?$"
    found = {"".join(line[:3]): line[3] for line in re.findall(table, german, re.MULTILINE)}
    assert set(found) == shown
    for english, words in found.items():
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", words)), english


def test_images_have_the_language_packs() -> None:
    for locale in set(language.LOCALES.values()) - {"en"}:
        assert f"jupyterlab-language-pack-{locale.replace('_', '-')}" in PLATFORM.read_text()


@pytest_asyncio.fixture(loop_scope="package", params=["de", "en"])
async def spoken(request: pytest.FixtureRequest, lasting_site: Site) -> AsyncIterator[str]:
    """The language of the portal's pages when ada has started her session s2, which is ready."""
    site = lasting_site
    site.broker.command = COMMAND
    await site.start("s2", image="torch", minutes=60, language=request.param)
    await eventually(lambda: site.is_ready("s2"), "JupyterLab is ready")
    yield request.param
    process = site.broker.processes[max(site.broker.processes)]
    process.kill()
    await process.wait()
    for folder in (Path(tempfile.gettempdir(), f"carme-{process.pid}"), site.broker.socket.parent / LAB):
        shutil.rmtree(folder, ignore_errors=True)

    async def is_known() -> bool:
        return not await site.server("s2")

    await eventually(is_known, "the hub knows that the session has ended")


@pytest_asyncio.fixture(loop_scope="package")
async def front(spoken: str, gate: Gate) -> AsyncIterator[Front]:
    """The site's reverse proxy, for that session."""
    async with gate.opened_on(max(gate.site.broker.processes), "s2") as front:
        yield front


async def reads(page: Page, words: tuple[str, ...]) -> None:
    """Wait until JupyterLab and Carme's parts of it are in a language."""
    menu, button, category, left, title = words
    await expect(page.get_by_role("menuitem", name=menu, exact=True)).to_be_visible()
    await expect(page.locator(f'.jp-LauncherCard[data-category="{category}"]').first).to_be_visible()
    time = page.locator("#carme-session-time button")
    await expect(time).to_have_text(re.compile(left))
    await time.click()
    dialog = page.get_by_role("dialog").filter(has_text=title)
    await expect(dialog.get_by_role("button", name=button, exact=True)).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)


async def refuses(front: Front, spoken: str) -> None:
    """The session's server refuses requests in a language."""
    visits: list[tuple[str, object]] = [
        ("/carme/extend", {"minutes": 5}),
        ("/carme/extend", {"minutes": 0}),
        ("/carme/extend", {"minutes": MAXIMUM_MINUTES + 1}),
        ("/carme/examples", {"name": "none"}),
        ("/app/none/", None),
    ]
    for (path, body), sentence in zip(visits, REFUSALS[spoken], strict=True):
        status, answer = await front.site.visit(path, front.token, "s2", post=body)
        text = answer.decode()
        assert status >= 400
        assert sentence in (json.loads(text)["message"] if body else text), path


@pytest.mark.asyncio(loop_scope="package")
async def test_jupyterlab_begins_in_the_portals_language_and_the_users_choice_stays(
    spoken: str, front: Front, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front.site.broker, "refuse", BEGUN)
    ends = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()
    front.status = {"ends": ends, "stops_idle": None, "extend": True, "warned": [], "warned_idle": []}
    await page.goto(f"{front.url}{front.base}lab?reset")
    await reads(page, WORDS[spoken])
    await refuses(front, spoken)
    (chosen,) = {*WORDS} - {spoken}
    assert await page.evaluate(CHOOSE, [front.base, language.LOCALES[chosen]]) == 204
    stored = front.home / LAB / "user-settings/@jupyterlab/translation-extension"
    assert json.loads((stored / "plugin.jupyterlab-settings").read_text()) == {
        "locale": language.LOCALES[chosen]
    }
    await page.reload()
    await reads(page, WORDS[chosen])
    await refuses(front, chosen)
