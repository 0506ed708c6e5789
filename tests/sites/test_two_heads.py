"""The active one of two heads is killed while sessions run and users book, and the standby takes over."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from portal_bookings import booked, send

from carme.errors import CarmeError
from carme.heads.promotion import ACTIVE, SERVICES
from carme.validation import Visitor
from patience import HANG

from . import two_heads
from .record import Record
from .site_hosts import SiteHosts, wait_until
from .site_run import Run, changed_hosts
from .two_heads import ADDRESS, PROGRAM, URL, USERS
from .whole_site import WholeSite

SESSIONS = int(os.environ.get("CARME_SITE_SESSIONS", "20"))
#: Long enough for as many sessions on a busy machine; it only ends what hangs.
STARTED = 20 * HANG
OPTIONS = {"nodes": "1", "gpus_per_node": "0", "minutes": "240", "image": "base"}
SECRETS = "/etc/carme/secrets"


@pytest.fixture(scope="module")
def heads(keep_site: bool, resume_site: bool) -> Iterator[WholeSite]:
    record = Record("two-heads", resume_site)
    site = SiteHosts(two_heads.DESCRIPTION)
    try:
        if not record.is_done("set up"):
            with record.step("hosts"):
                site.make()
            with record.step("set up"):
                record.keep("passwords", two_heads.set_up(site))
        heads = WholeSite(site, record, record.results["passwords"], URL, "head-2")
        try:
            done = heads.run_playbook("site.yml")
        finally:
            site.save_layers()
        assert done.returncode == 0, done.stdout[-6000:]
        yield heads
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


def copies_from(site: SiteHosts, host: str, source: str) -> bool:
    shown = site.run(host, PROGRAM, "status", "--json", check=False)
    return shown.returncode == 0 and json.loads(shown.stdout)["copied_from"] == source


def jobs(site: SiteHosts) -> dict[str, str]:
    """Slurm's running jobs, with when they started."""
    shown = site.run("db", "squeue", "--noheader", "--states=RUNNING", "--format=%i %S").stdout
    return dict(line.split() for line in shown.splitlines())


@dataclass
class Bookings:
    """A user who books again and again, and notes which bookings were confirmed."""

    visitor: Visitor
    confirmed: list[str] = field(default_factory=list)
    _number: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._first = (datetime.now(UTC) + timedelta(days=1)).replace(minute=0)
        self._thread = threading.Thread(target=self._book)

    def __enter__(self) -> Bookings:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _book(self) -> None:
        while not self._ended.wait(0.2):
            start = self._first + timedelta(hours=self._number)
            self._number += 1
            with contextlib.suppress(CarmeError, httpx.HTTPError, AssertionError):
                answer = send(self.visitor, date=f"{start:%Y-%m-%d}", time=f"{start:%H:%M}")
                self.confirmed.append(booked(answer))

    def more(self, count: int) -> None:
        """Wait until further ones were confirmed."""
        wanted = len(self.confirmed) + count
        wait_until("bookings are confirmed", lambda: len(self.confirmed) >= wanted, STARTED)


def answers(visitor: Visitor, server: str) -> bool:
    """Whether the notebook server of a session answers its owner."""
    try:
        return visitor.http.get(f"{server}api/kernels").status_code == 200
    except httpx.TransportError:
        return False


def signed_in(heads: WholeSite, user: str) -> bool:
    """Whether somebody with a new browser can sign in and sees the form for sessions."""
    try:
        with heads.visitor(user) as visitor:
            return visitor.fetch(visitor.url).status_code == 200
    except (CarmeError, httpx.HTTPError):
        return False


def test_site_yml_makes_one_head_active_and_the_other_its_standby(heads: WholeSite) -> None:
    site = heads.site
    assert is_active(site, "head-1") and is_standby(site, "head-2")
    units = list(SERVICES)
    enabled = site.run("head-1", "systemctl", "is-enabled", *units, check=False).stdout.split()
    assert enabled == ["disabled"] * len(units)
    listed = ("sh", "-c", f"cd {SECRETS} && stat --format='%n %U:%G %a' * && sha256sum *")
    assert site.run("head-1", *listed).stdout == site.run("head-2", *listed).stdout
    modes = site.run("head-1", *listed).stdout
    assert "portal-database-password root:carme-portal 640\n" in modes
    assert "hub-database-password root:carme-hub 640\n" in modes
    for host in site.machines:
        text = site.run(host, "cat", "/etc/carme/carme.toml", check=False).stdout
        assert heads.passwords["portal"] not in text and heads.passwords["hub"] not in text


def test_a_check_of_the_installed_site_changes_nothing(heads: WholeSite) -> None:
    done = heads.run_playbook("check", "--check", "--diff")
    assert done.returncode == 0, done.stdout[-6000:]
    assert {counts["changed"] for counts in changed_hosts(done.stdout).values()} == {0}, done.stdout[-6000:]


def test_a_second_run_changes_nothing(heads: WholeSite) -> None:
    done = heads.run_playbook("again")
    assert done.returncode == 0, done.stdout[-6000:]
    assert {counts["changed"] for counts in changed_hosts(done.stdout).values()} == {0}, done.stdout[-6000:]


def test_the_standby_takes_over_and_back(heads: WholeSite) -> None:
    site, record = heads.site, heads.record
    wait_until("the state was copied", lambda: copies_from(site, "head-2", "head-1"), HANG)
    refused = head(site, "head-2", "promote", code=1)
    assert "head-1 is the active head and renews its lease" in refused.stderr
    epoch = status(site, "head-1")["epoch"]
    with contextlib.ExitStack() as stack:
        visitor = stack.enter_context(heads.visitor(USERS[0]))
        names = [visitor.start(OPTIONS) for _ in range(SESSIONS)]
        for name in names:
            visitor.wait(name, "ready", STARTED)
        servers = [visitor.open(name) for name in names]
        kernel = stack.enter_context(visitor.kernel(servers[0]))
        assert kernel.run("state = 42", timeout=STARTED).ok
        assert len(before := jobs(site)) >= SESSIONS
        bookings = stack.enter_context(Bookings(stack.enter_context(heads.visitor(USERS[1]))))
        bookings.more(3)

        with record.step("failover") as noted:
            site.podman.run("kill", site.podman.container("head-1"))
            killed = time.monotonic()
            head(site, "head-2", "promote")
            noted["promoted"] = round(time.monotonic() - killed)
            wait_until("logins work", lambda: signed_in(heads, USERS[0]), STARTED)
            noted["logins"] = round(time.monotonic() - killed)
            bookings.more(2)
            noted["bookings"] = round(time.monotonic() - killed)
        assert is_active(site, "head-2") and status(site, "head-2")["epoch"] == epoch + 1
        for name, server in zip(names, servers, strict=True):
            wait_until(f"{name} answers", lambda server=server: answers(visitor, server), STARTED)
            assert visitor.session(name).state == "ready"
        assert before.items() <= jobs(site).items()
        kernel.connect()
        assert kernel.run("print(state)", timeout=STARTED).output.strip() == "42"
        noted["sessions"] = len(names)
    shown = site.run("db", "scontrol", "--oneliner", "show", "reservation").stdout
    lost = [name for name in bookings.confirmed if f"ReservationName={name} " not in shown]
    assert lost == [], bookings.confirmed
    noted["confirmed bookings"] = len(bookings.confirmed)
    record.write()

    with record.step("back"):
        site.podman.run("start", site.podman.container("head-1"), timeout=300)
        wait_until("the killed head copies the state", lambda: copies_from(site, "head-1", "head-2"), STARTED)
        wait_until("it stands by", lambda: is_standby(site, "head-1"), STARTED)
        assert is_active(site, "head-2")
        head(site, "head-2", "demote")
        wait_until("it stands by", lambda: is_standby(site, "head-2"), HANG)
        head(site, "head-1", "promote")
        assert is_active(site, "head-1") and status(site, "head-1")["epoch"] == epoch + 2
        wait_until("logins work", lambda: signed_in(heads, USERS[0]), STARTED)
    with heads.visitor(USERS[0]) as visitor:
        for name in names:
            assert visitor.session(name).state == "ready"
            visitor.stop(name)
    head(site, "head-2", "promote", "--force")
    wait_until("the other one has stopped by itself", lambda: is_standby(site, "head-1"), HANG)
    assert is_active(site, "head-2")
    head(site, "head-2", "demote")
    head(site, "head-1", "promote")


def test_removal_leaves_nothing_of_either_head(heads: WholeSite) -> None:
    """The last one: what is not part of Carme goes on, Slurm and the site's PostgreSQL."""
    done = heads.run_playbook("remove.yml", "-e", "removal_data=true", playbook="remove.yml")
    assert done.returncode == 0, done.stdout[-6000:]
    site = heads.site
    assert not any(site.left_of_services(name) for name in site.machines)
    for host in two_heads.HEADS:
        assert f" {ADDRESS}/" not in site.run(host, "ip", "-oneline", "address").stdout
    for words in (("pg_isready", "--quiet"), ("scontrol", "ping")):
        assert site.run("db", *words, check=False).returncode == 0, words
