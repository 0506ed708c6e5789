"""JupyterLab's launcher as the session's home: apps, examples, portal and help, on a real server."""

import socket

import pytest
from playwright.async_api import Page, Route, expect

from ..conftest import eventually
from .conftest import FOLDER
from .front import BASE, Front

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_the_launcher_is_the_sessions_home(front: Front, page: Page) -> None:
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(f"{front.url}{BASE}lab?reset")
    tile = page.locator('.jp-LauncherCard[data-category="Session"]')
    await expect(tile.filter(has_text="Examples")).to_be_visible()
    await expect(tile).to_have_text(["TensorBoard", "Terminal", "Examples", "Portal", "Help"])
    # They are in sight: only the notebooks come before them.
    sections = page.locator(".jp-Launcher-sectionTitle")
    await expect(sections).to_have_text(["Notebook", "Session", "Examples", "Console", "Other"])
    # The kernel is called as the image, and the home has no kernel of it.
    kernel = page.locator('.jp-LauncherCard[data-category="Notebook"]')
    await expect(kernel.first).to_contain_text("Python 3 · Deep <Learning> image")
    assert not list(front.home.rglob("kernel.json"))

    # The page of this session, and the guides, in tabs of their own.
    app = ("TensorBoard", f"{BASE}tensorboard/")
    for name, path in (app, ("Portal", "/sessions/s1/"), ("Help", "/help/")):
        async with page.context.expect_page() as opened:
            await tile.filter(has_text=name).click()
        opened_page = await opened.value
        await eventually(lambda path=path: front.questions[path], f"{name} leads to {path}")
        await opened_page.close()

    # A web app of the user's own is there as soon as somebody returns to the page, and gone with it.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(FOLDER / "apps/mine.sock"))
        listening.listen()
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await expect(tile.filter(has_text="mine")).to_be_visible()
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await expect(tile.filter(has_text="mine")).to_have_count(0)

    # An example opens as a copy of one's own, from its tile or from the gallery, and runs with one click.
    example = page.locator('.jp-LauncherCard[data-category="Examples"]')
    await expect(example).to_have_text(["First <steps>"])
    await example.click()
    await expect(page.locator(".jp-Notebook .jp-RenderedMarkdown h1").first).to_contain_text("First")
    await page.get_by_role("button", name="Run All", exact=True).click()
    await expect(page.locator(".jp-Notebook .jp-CodeCell .jp-OutputArea-output")).to_have_text("has run")
    await page.get_by_role("tab", name="Launcher").click()
    await tile.filter(has_text="Examples").click()
    tab = page.locator(".lm-TabBar-tab").filter(has_text="Examples")
    await expect(tab.locator(".lm-TabBar-tabIcon svg")).to_be_visible()
    await page.get_by_role("button", name="First <steps> What this session has.").click()
    await expect(page.locator(".jp-Notebook .jp-RenderedMarkdown h1").first).to_contain_text("First")
    assert (front.home / "examples/1-first.ipynb").is_file()

    # The way out is the portal's, and the hub's page is the portal.
    await page.get_by_role("menuitem", name="File", exact=True).click()
    menu = page.locator(".lm-Menu").first
    await expect(menu.get_by_role("menuitem", name="Hub Control Panel")).to_be_visible()
    assert await menu.get_by_role("menuitem", name="Log Out").count() == 0
    async with page.context.expect_page() as opened:
        await menu.get_by_role("menuitem", name="Hub Control Panel").click()
    await opened.value
    await eventually(lambda: front.questions["/"], "it leads to the portal")
    assert not complaints


async def test_a_theme_that_is_lost_on_its_way_is_loaded_again(front: Front, page: Page) -> None:
    lost: list[str] = []

    async def lose_two(route: Route) -> None:
        lost.append(route.request.url)
        await (route.abort() if len(lost) <= 2 else route.continue_())

    await page.route("**/lab/api/themes/**", lose_two)
    await page.goto(f"{front.url}{BASE}lab?reset")
    await expect(page.locator("body[data-jp-theme-name]")).to_be_attached()
    assert len(lost) == 3
    assert await page.locator(".jp-Dialog").count() == 0
