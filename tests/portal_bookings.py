"""Bookings as a user makes them, by the portal's own forms."""

import re

import httpx
from bs4 import BeautifulSoup

from carme.validation import Visitor

BOOKING = {"nodes": "1", "length": "30m", "title": "Cluster test"}


def booked(answer: httpx.Response) -> str:
    """The booking's name in the answer to its form."""
    found = re.search(r"/bookings/(carme-[0-9a-f]{12})/$", str(answer.url))
    assert found, re.sub(r"<[^>]+>", " ", answer.text)
    return found[1]


def send(visitor: Visitor, **values: str) -> httpx.Response:
    """Send the form for a booking."""
    page = visitor.fetch(f"{visitor.url}bookings/new/")
    return visitor.send(page, visitor.form(page, "length"), BOOKING | values)


def confirm(visitor: Visitor, address: str) -> None:
    """Press the button of a page that asks for confirmation."""
    page = visitor.fetch(f"{visitor.url}{address}")
    form = BeautifulSoup(page.text, "html.parser").select_one("main form")
    assert form is not None, page.text
    visitor.send(page, form, {})
