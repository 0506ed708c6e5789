"""The active one of two heads is killed, and the standby takes over."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from carme.heads.promotion import ACTIVE, SERVICES
from patience import HANG

from . import two_heads
from .conftest import Record
from .site_hosts import SiteHosts, wait_until
from .two_heads import ADDRESS, PROGRAM, SECRET

Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def site(keep_site: bool, resume_site: bool) -> Iterator[SiteHosts]:
    """Two heads of which none was promoted yet."""
    record = Record("two-heads", resume_site)
    site = SiteHosts(two_heads.DESCRIPTION)
    try:
        if not record.is_done("set up"):
            with record.step("hosts"):
                site.make()
            with record.step("set up"):
                two_heads.set_up(site)
        yield site
    finally:
        if not keep_site:
            site.destroy()


def head(site: SiteHosts, host: str, *words: str, code: int = 0) -> Run:
    done = site.run(host, PROGRAM, *words, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def status(site: SiteHosts, host: str) -> dict[str, Any]:
    return json.loads(head(site, host, "status", "--json").stdout)


def is_active(site: SiteHosts, host: str) -> bool:
    """Whether a head runs all of its services and has the address; else it must have none of both."""
    units = status(site, host)["units"]
    assert set(units) == {ACTIVE, *SERVICES}
    address = f" {ADDRESS}/" in site.run(host, "ip", "-oneline", "address").stdout
    running = {state == "active" for state in units.values()}
    assert running in ({address}, {True, False}), units
    return running == {True}


def is_standby(site: SiteHosts, host: str) -> bool:
    units = status(site, host)["units"]
    address = f" {ADDRESS}/" in site.run(host, "ip", "-oneline", "address").stdout
    return not address and not {"active", "activating", "deactivating"} & set(units.values())


class Bookings:
    """A client that books again and again, and notes which bookings were confirmed."""

    def __init__(self) -> None:
        self.confirmed: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._book)

    def __enter__(self) -> Bookings:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _book(self) -> None:
        number = 0
        while not self._ended.wait(0.1):
            number += 1
            request = urllib.request.Request(f"http://{ADDRESS}:8100/{number}", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    if answer.read() == b"booked":
                        self.confirmed.append(number)
            except OSError:
                continue

    def more(self) -> None:
        """Wait until further ones were confirmed."""
        wanted = len(self.confirmed) + 5
        wait_until("bookings are confirmed", lambda: len(self.confirmed) >= wanted, HANG)


def test_the_standby_takes_over_and_back(site: SiteHosts) -> None:
    head(site, "head-1", "promote", "--first")
    assert is_active(site, "head-1")
    assert site.run("head-2", "systemctl", "start", ACTIVE, check=False).returncode != 0
    wait_until("it stands by", lambda: is_standby(site, "head-2"), HANG)
    wait_until("the state was copied", lambda: status(site, "head-2")["copied_from"] == "head-1", HANG)
    shown = site.run("head-2", "stat", "--format=%U:%G %a", SECRET).stdout
    assert shown == "root:carme-hub 640\n"
    refused = head(site, "head-2", "promote", code=1)
    assert "head-1 is the active head and renews its lease" in refused.stderr

    with Bookings() as bookings:
        bookings.more()
        site.podman.run("kill", site.podman.container("head-1"))
        killed = time.monotonic()
        head(site, "head-2", "promote")
        bookings.more()
        print(f"Bookings were confirmed again within {time.monotonic() - killed:.0f} s of the kill.")
    assert is_active(site, "head-2") and status(site, "head-2")["epoch"] == 2
    query = ["runuser", "--login", "postgres", "--command", "psql -At carme --command 'TABLE booking'"]
    stored = {int(line) for line in site.run("db", *query).stdout.split()}
    assert set(bookings.confirmed) <= stored

    site.podman.run("start", site.podman.container("head-1"), timeout=300)
    wait_until("the killed head knows the state", lambda: copies_from(site, "head-1", "head-2"), HANG)
    wait_until("it stands by", lambda: is_standby(site, "head-1"), HANG)
    assert is_active(site, "head-2")

    head(site, "head-2", "demote")
    wait_until("it stands by", lambda: is_standby(site, "head-2"), HANG)
    head(site, "head-1", "promote")
    assert is_active(site, "head-1") and status(site, "head-1")["epoch"] == 3

    head(site, "head-2", "promote", "--force")
    wait_until("the other one has stopped by itself", lambda: is_standby(site, "head-1"), HANG)
    assert is_active(site, "head-2")


def copies_from(site: SiteHosts, host: str, other: str) -> bool:
    shown = site.run(host, PROGRAM, "status", "--json", check=False)
    return shown.returncode == 0 and json.loads(shown.stdout)["copied_from"] == other
