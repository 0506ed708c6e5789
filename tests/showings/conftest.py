"""Whole journeys in Chromium, too slow to be tried with each change; the fixtures are the browser tests'."""

from browser.conftest import chromium, context, demo, keep, own_beginning_and_end, page

__all__ = ["chromium", "context", "demo", "keep", "own_beginning_and_end", "page"]
