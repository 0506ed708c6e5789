"""Fixtures of the tests that drive Chromium against the running demo cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from demo_site import ROOT, DemoSite

# Chromium must talk to the site alone, and to nobody in the background.
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def demo() -> DemoSite:
    return DemoSite()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def context(chromium: Browser, demo: DemoSite) -> Iterator[BrowserContext]:
    context = chromium.new_context(
        base_url=demo.url, ignore_https_errors=True, viewport={"width": 1280, "height": 860}
    )
    context.set_default_timeout(60_000)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def keep(page: Page) -> Callable[[str], None]:
    """Keeps a screenshot in `artifacts/screenshots`, or in the folder that CARME_SCREENSHOTS names."""
    folder = Path(os.environ.get("CARME_SCREENSHOTS", ROOT / "artifacts/screenshots"))
    folder.mkdir(parents=True, exist_ok=True)

    def screenshot(name: str) -> None:
        page.screenshot(path=folder / f"{name}.png")

    return screenshot


@pytest.fixture(autouse=True)
def no_job_left(demo: DemoSite) -> Iterator[None]:
    """Each test leaves the cluster as it found it, also when it failed."""
    yield
    demo.end_all_jobs()
