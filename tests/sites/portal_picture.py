"""A picture of a site's portal, as one of its users sees it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import ViewportSize, expect, sync_playwright
from real_chromium import OPTIONS, program, sign_in

from patience import HANG


def take_picture(file: Path, url: str, address: str, user: str, password: str) -> list[str]:
    """Take a picture of the page on which a user starts sessions; returns the partitions that it offers.

    Args:
        file: takes the picture, as PNG.
        url: the portal's address.
        address: of its host, which no name service here knows.
        user: who signs in.
        password: theirs.
    """
    names = f"--host-resolver-rules=MAP {urlsplit(url).hostname} {address}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=[*OPTIONS, names])
        size: ViewportSize = {"width": 1280, "height": 860}
        page = browser.new_page(base_url=url, ignore_https_errors=True, viewport=size)
        page.set_default_timeout(HANG * 1000)
        page.goto("/")
        sign_in(page, user, password)
        expect(page.get_by_role("heading", name="Start a session")).to_be_visible(timeout=HANG * 1000)
        partitions = page.locator("#id_partition option").all_text_contents()
        file.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=file, full_page=True)
        browser.close()
    return partitions
