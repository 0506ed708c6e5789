"""Chromium, in which tests open pages."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["OPTIONS", "program", "sign_in"]

#: It sends requests for pages of tests alone, and none in the background. Playwright adds more of these.
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def program() -> str | None:
    """The path of Chromium; None where there is none.

    The headless shell has the same engine without the windows around it.
    """
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


def sign_in(page: Page, name: str, password: str) -> None:
    """Fill in the portal's form, which the page shows, and send it."""
    page.get_by_label("User name").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in", exact=True).click()
