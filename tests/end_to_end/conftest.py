"""Whole journeys in Chromium, too slow to be tried with each change; the fixtures are the browser tests'."""

import pytest
from browser.conftest import chromium, context, keep, own_beginning_and_end, page

from demo_site import DemoSite

__all__ = ["chromium", "context", "keep", "own_beginning_and_end", "page"]


@pytest.fixture(scope="session")
def demo() -> DemoSite:
    return DemoSite()
