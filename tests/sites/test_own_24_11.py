"""A site that site.yml makes of new hosts, with PostgreSQL, a provider of the site and login hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from simulated_provider import Provider

from carme.validation import Visitor
from patience import HANG

from . import own_24_11
from .own_24_11 import LOGIN, NODES, OUTSIDER, URL, USERS
from .record import Record, attempt
from .site_hosts import SiteHosts, wait_until
from .site_run import changed_hosts
from .site_use import book_for_now, delete_booking, ended, reservation
from .whole_site import WholeSite

#: A session's first start may have to wait for the image on each node.
STARTED = 5 * HANG
OPTIONS = {"nodes": "2", "gpus_per_node": "1", "minutes": "30", "image": "base"}
PARTITION = ("--partition=gpu", "--time=5")


@pytest.fixture(scope="module")
def new_hosts(keep_site: bool, resume_site: bool) -> Iterator[WholeSite]:
    """Hosts with nothing but their system."""
    record = Record("own-24.11", resume_site)
    site = SiteHosts(own_24_11.DESCRIPTION)
    try:
        if not record.is_done("set up"):
            with record.step("hosts"):
                site.make()
            with record.step("set up"):
                record.keep("passwords", own_24_11.set_up(site))
        yield WholeSite(site, record, record.results["passwords"], URL, "portal")
    finally:
        if not keep_site:
            with record.step("hosts taken away"):
                site.destroy()


@pytest.fixture(scope="module")
def installed(new_hosts: WholeSite) -> WholeSite:
    """All of it, by one run of site.yml."""
    new_hosts.remember("before")
    try:
        done = new_hosts.run_playbook("site.yml")
    finally:
        new_hosts.site.save_layers()
    assert done.returncode == 0, done.stdout[-6000:]
    new_hosts.remember("after")
    return new_hosts


@pytest.fixture(scope="module")
def provider(installed: WholeSite) -> Iterator[Provider]:
    """The site's provider."""
    found = own_24_11.start_provider(installed.site)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def session(installed: WholeSite, provider: Provider) -> dict[str, str]:
    """The first session of somebody whom the provider alone knows: its user, and on how many nodes it ran."""
    record = installed.record
    if record.is_done("session") and "session" in record.results:
        return record.results["session"]
    with record.step("session"), installed.browser() as visitor:
        page = visitor.fetch(f"{visitor.url}accounts/outside/?next=/profile/")
        name = visitor.start(OPTIONS)
        visitor.wait(name, "ready", STARTED)
        with visitor.kernel(visitor.open(name)) as kernel:
            user = kernel.run("import getpass; print(getpass.getuser())", timeout=STARTED).output.strip()
        running = ("squeue", "--noheader", "--states=RUNNING", f"--user={OUTSIDER}", "--format=%D")
        nodes = installed.site.run("portal", *running).stdout.strip()
        visitor.stop(name)
        record.keep("session", {"page": str(page.url), "user": user, "nodes": nodes})
    return record.results["session"]


@pytest.fixture(scope="module")
def booking(installed: WholeSite) -> dict[str, str]:
    """What Slurm reported of a booking that had begun, and how a job of its owner in it ended."""
    site, record = installed.site, installed.record
    if record.is_done("booking") and "booking" in record.results:
        return record.results["booking"]
    with record.step("booking"), installed.visitor(USERS[0]) as owner:
        name = book_for_now(site, owner)
        line = reservation(site, name)
        job = submitted(site, LOGIN[0], f"--reservation={name}")
        record.keep("booking", {"reservation": line, "job": ended(site, job)})
        delete_booking(site, owner, name)
    return record.results["booking"]


@pytest.fixture(scope="module")
def login_job(installed: WholeSite) -> dict[str, str]:
    """A job that was submitted on one login host, and what the other one and the portal know of it."""
    site, record = installed.site, installed.record
    if record.is_done("login job") and "login job" in record.results:
        return record.results["login job"]
    with record.step("login job"), installed.visitor(USERS[0]) as owner:
        job = submitted(site, LOGIN[0], "--nodes=2")
        state = ended(site, job)
        words = ("sacct", "--allocations", "--noheader", f"--jobs={job}", "--format=JobID")
        seen = site.run(LOGIN[1], *words, user=USERS[0]).stdout.strip()
        # The portal learns within seconds of a job that is over.
        wait_until("its page says so", lambda: is_completed(owner, job), HANG)
        record.keep("login job", {"job": job, "state": state, "seen": seen})
    return record.results["login job"]


@pytest.fixture(scope="module")
def validated(installed: WholeSite) -> WholeSite:
    """The site's own check, of all hosts and then of one node."""
    was_done = installed.record.is_done("validate.yml")
    installed.run_playbook("validate.yml", playbook="validate.yml")
    if not (was_done and "validation" in installed.record.results):
        shown = installed.site.run("portal", "cat", "/var/log/carme/validation.json").stdout
        installed.record.keep("validation", json.loads(shown))
    installed.run_playbook("validate.yml of a node", "--limit", NODES[0], playbook="validate.yml")
    return installed


@pytest.fixture(scope="module")
def again(installed: WholeSite, request: pytest.FixtureRequest) -> WholeSite:
    """site.yml once more, after users have worked."""
    attempt(request, "session", "booking", "login_job", "validated")
    installed.run_playbook("site.yml again")
    return installed


@pytest.fixture(scope="module")
def removed(new_hosts: WholeSite, request: pytest.FixtureRequest) -> WholeSite:
    """Carme is taken away with its data, also where it was not installed to the end."""
    attempt(request, "installed", "again")
    new_hosts.run_playbook("remove.yml", "-e", "removal_data=true", playbook="remove.yml")
    return new_hosts


def submitted(site: SiteHosts, host: str, *options: str) -> str:
    """The number of a job that a user submits with Slurm's own command."""
    words = ("sbatch", "--parsable", "--output=/dev/null", *PARTITION, *options, "--wrap", "srun hostname")
    found = re.match(r"\d+", site.run(host, *words, user=USERS[0]).stdout)
    assert found is not None
    return found[0]


def is_completed(owner: Visitor, job: str) -> bool:
    """Whether the portal shows a user that a job of theirs has come to its end."""
    page = owner.fetch(f"{owner.url}jobs/{job}/")
    return page.status_code == 200 and ">Completed</span>" in page.text


def test_site_yml_makes_the_site(installed: WholeSite) -> None:
    site = installed.site
    # Debian calls it slurm-wlm.
    assert site.run("portal", "scontrol", "--version").stdout.split()[-1].startswith("24.11")
    query = ("psql", "--tuples-only", "--no-align", "--command", "SELECT count(*) FROM django_migrations")
    counted = site.run("portal", "runuser", "-u", "carme-portal", "--", *query, "carme-portal").stdout
    assert int(counted) > 0
    for host in LOGIN:
        shown = site.run(host, "sinfo", "--noheader", "--Node", "--format=%N", user=USERS[0]).stdout
        assert sorted(set(shown.split())) == list(NODES)


def test_what_was_there_stays(installed: WholeSite) -> None:
    assert installed.changed("before", "after") == {name: set() for name in installed.site.machines}
    assert "/etc/ssh/sshd_config" in installed.sums["before"]["portal"]


def test_who_is_known_to_the_provider_works(session: dict[str, str]) -> None:
    assert session["page"] == f"{URL}/profile/"
    assert session["user"] == OUTSIDER
    assert session["nodes"] == str(len(NODES))


def test_a_booking_is_a_reservation_of_its_owner(booking: dict[str, str]) -> None:
    assert f"Users={USERS[0]} " in booking["reservation"]
    assert booking["job"].startswith("COMPLETED|")


def test_a_job_of_one_login_host_is_seen_on_the_other_and_in_the_portal(login_job: dict[str, str]) -> None:
    assert login_job["state"].startswith("COMPLETED|")
    assert login_job["seen"] == login_job["job"]


def test_the_sites_own_check_passes(validated: WholeSite) -> None:
    """It trains a model over two nodes in a session, and lets one user attack another."""
    verdict, done = validated.record.results["validation"], validated.runs["validate.yml"]
    assert done.returncode == 0, done.stdout[-4000:]
    assert verdict["ok"], [check for check in verdict["checks"] if not check["ok"]]
    assert verdict["left_out"] == []
    assert {check["host"] for check in verdict["checks"]} == set(validated.site.machines)
    on_node = validated.runs["validate.yml of a node"]
    assert on_node.returncode == 0, on_node.stdout[-4000:]
    assert set(changed_hosts(on_node.stdout)) == {NODES[0]}


def test_a_second_run_changes_nothing(again: WholeSite) -> None:
    done = again.runs["site.yml again"]
    assert done.returncode == 0, done.stdout[-6000:]
    assert {counts["changed"] for counts in changed_hosts(done.stdout).values()} == {0}, done.stdout[-6000:]


def test_removal_leaves_no_service_of_carmes(removed: WholeSite) -> None:
    done = removed.runs["remove.yml"]
    assert done.returncode == 0, done.stdout[-6000:]
    assert {name: removed.site.left_of_services(name) for name in removed.site.machines} == {
        name: [] for name in removed.site.machines
    }
