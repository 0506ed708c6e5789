"""Fixtures of the tests that drive Chromium against the running demo cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright
from real_chromium import OPTIONS, program, sign_in

from demo_site import DemoSite
from patience import HANG

# The screens that show a page: a wide one and a phone's.
DESKTOP: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 375, "height": 740}


def log_in(page: Page, demo: DemoSite, user: str = "") -> None:
    """Sign in by the form."""
    user = user or demo.user
    page.goto("/")
    sign_in(page, user, demo.passwords[user])
    expect(page.get_by_role("heading", name="Start a session")).to_be_visible()


def open_start_form(page: Page) -> None:
    """Show all fields of the start form: the numbers, and those under "More options"."""
    for group in ("Hardware", "Time"):
        page.get_by_role("group", name=group).get_by_label("Custom").check()
    if not page.get_by_label("Title").is_visible():
        page.get_by_text("More options").click()


def start(page: Page, title: str, **fields: int) -> None:
    """Fill in the start form, wherever the page is, and send it; ends on the session's page."""
    page.goto("/")
    open_start_form(page)
    page.get_by_label("Title").fill(title)
    if "minutes" in fields:
        page.locator("#id_hours").fill("0")  # else those of the usual time are added
    for name, value in fields.items():
        page.locator(f"#id_{name}").fill(str(value))
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("heading", name=title)).to_be_visible()


@pytest.fixture(scope="session")
def demo() -> DemoSite:
    """The demo with users of its own: other tests may run beside these."""
    return DemoSite.with_second_users()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=HANG * 1000)  # its own 5 s are too short for a busy machine
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def context(chromium: Browser, demo: DemoSite) -> Iterator[BrowserContext]:
    context = chromium.new_context(base_url=demo.url, ignore_https_errors=True, viewport=DESKTOP)
    context.set_default_timeout(HANG * 1000)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def keep(page: Page) -> Callable[[str], None]:
    """Keeps a screenshot where CARME_SCREENSHOTS names a folder: drawing and packing one takes time."""

    def screenshot(name: str) -> None:
        if folder := os.environ.get("CARME_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder) / f"{name}.png")

    return screenshot


@pytest.fixture
def keep_screenshots(page: Page, keep: Callable[[str], None]) -> Callable[[str], None]:
    """Keeps screenshots of a page on a wide screen and on a phone, light and dark; nothing may stick out."""

    def screenshots(name: str) -> None:
        for size, width in (("desktop", DESKTOP), ("phone", PHONE)):
            page.set_viewport_size(width)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                keep(f"{name}-{size}-{scheme}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width["width"]
        page.set_viewport_size(DESKTOP)
        page.emulate_media(color_scheme="light")

    return screenshots


@pytest.fixture(autouse=True)
def own_beginning_and_end(demo: DemoSite) -> Iterator[None]:
    """Each test begins with nothing open in JupyterLab, and leaves no job, also when it failed."""
    # JupyterLab would reopen what an earlier test had left open.
    demo.run("head", "rm", "-rf", f"/home/{demo.user}/.jupyter/lab/workspaces")
    yield
    demo.end_all_jobs()
