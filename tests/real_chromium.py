"""Chromium, in which tests open pages."""

import shutil

__all__ = ["OPTIONS", "program"]

#: It talks to what a test opens, and to nobody in the background. Playwright adds more of these.
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
