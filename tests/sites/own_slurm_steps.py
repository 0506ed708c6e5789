"""A site with a Slurm of its own gets Carme as docs/admins/install.md says, and loses it: the steps.

Each is a fixture of a class of tests, which says with SITE which site it is about.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from .existing_slurm import NODES, ExistingSlurm, versions
from .own_slurm_example import Example, append_hooks, findings, hide_processes, leave_exporters_group
from .portal_picture import take_picture
from .record import ARTIFACTS, Record, attempt
from .site_hosts import SiteHosts
from .site_run import SiteRun
from .site_use import book_for_now, delete_booking, ended, reservation

#: The steps that install Carme once more.
AGAIN = ("site.yml again", "images again")
PROJECT = ["--account", "research", "--partition", "gpu"]


@dataclass
class Visit(SiteRun):
    """What the steps have left, for the tests to look at."""

    kind: ExistingSlurm
    example: Example
    named: dict[str, set[str]] = field(default_factory=dict)


@pytest.fixture(scope="class")
def visit(request: pytest.FixtureRequest, keep_site: bool, resume_site: bool) -> Iterator[Visit]:
    """The site as its administrators have it: Slurm works, Carme is not there."""
    assert request.cls is not None
    kind: ExistingSlurm = request.cls.SITE
    record = Record(kind.name, resume_site)
    site = SiteHosts(kind.description)
    try:
        if not record.is_done("slurm"):
            with record.step("hosts"):
                site.make()
            with record.step("slurm"):
                kind.set_up(site)
        record.versions = versions(site)
        record.write()
        yield Visit(site, record, kind, Example(site))
    finally:
        if not keep_site:
            with record.step("hosts taken away"):
                site.destroy()


@pytest.fixture(scope="class")
def prechecked(visit: Visit) -> Visit:
    """The page's steps 1 to 3: described, checked, done what it says, checked again."""
    example = visit.example
    visit.remember("untouched")
    example.write(carme_head_address=visit.site.machines["portal"].address, **visit.kind.variables)
    (check, *_rest) = example.commands("site.yml")
    visit.play("first precheck", check, code=2)
    visit.remember("first precheck")
    if not visit.record.is_done("hooks"):
        with visit.record.step("hooks"):
            append_hooks(visit.site, "/etc/slurm")
            hiding = re.search(
                r"'(mount -o remount,[^']*)'+ hides them at once",
                findings(visit.runs["first precheck"].stdout),
            )
            assert hiding is not None
            for name in NODES:
                visit.site.run(name, *shlex.split(hiding[1]))
    example.write(
        carme_homes=["/data/home"],
        carme_bookings={"enabled": True, "notice_minutes": 0},
        carme_users=example.with_passwords(),
        images_names=["base", "torch"],
        images_torch="cpu",
        images_tensorflow="cpu",
        images_horovod=False,
        broker_audit_append_only=False,
    )
    visit.play("second precheck", check)
    visit.remember("before")
    return visit


@pytest.fixture(scope="class")
def installed(prechecked: Visit) -> Visit:
    """Step 4 without images, by the page's commands, and what comes after it on nodes that users share."""
    (_check, words, _images) = prechecked.example.commands("site.yml")
    done = prechecked.play("site.yml without images", words)
    assert done.returncode == 0, done.stdout[-4000:]
    if not prechecked.record.is_done("administrator"):
        with prechecked.record.step("administrator"):
            prechecked.example.add_administrator()
    prechecked.remember("after")
    if not prechecked.record.is_done("processes hidden"):
        with prechecked.record.step("processes hidden"):
            hide_processes(prechecked.site, NODES)
    prechecked.record.versions = versions(prechecked.site)
    prechecked.record.write()
    return prechecked


@pytest.fixture(scope="class")
def images(installed: Visit) -> Visit:
    """The images, by the page's last command of step 4; their layers serve the next site of this cache."""
    (_check, _site, words) = installed.example.commands("site.yml")
    try:
        done = installed.play("images", words)
    finally:
        installed.site.save_layers()
    assert done.returncode == 0, done.stdout[-4000:]
    return installed


@pytest.fixture(scope="class")
def validated(images: Visit) -> Visit:
    """Step 5."""
    (words,) = images.example.commands("validate.yml")
    was_done = images.record.is_done("validate.yml")
    images.play("validate.yml", words)
    if not (was_done and "validation" in images.record.results):
        shown = images.site.run("portal", "cat", "/var/log/carme/validation.json").stdout
        images.record.keep("validation", json.loads(shown))
    return images


@dataclass
class Booking:
    """What a booking was in Slurm, and which job ran in it."""

    reservation: str
    job: str
    released: bool


@pytest.fixture(scope="class")
def main_job(images: Visit) -> dict[str, Any]:
    """The verdict of `carme validate --training`: a session over two nodes in which a model is trained."""
    site, example, record = images.site, images.example, images.record
    if record.is_done("main job") and "main job" in record.results:
        return record.results["main job"]
    words = ["carme", "validate", "--training", "--json", "--user", "grace", "--password-file", "-"]
    words += ["--certificate", "/etc/ssl/certs/ca-certificates.crt", *PROJECT]
    with record.step("main job"):
        done = site.run(
            "portal", *words, user="grace", data=example.passwords["grace"] + "\n", check=False, timeout=1800
        )
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        record.keep("main job", json.loads(done.stdout))
    return record.results["main job"]


@pytest.fixture(scope="class")
def booking(images: Visit) -> Booking:
    """A booking that begins at once, with a job of its owner in it."""
    site, record = images.site, images.record
    if record.is_done("booking") and "booking" in record.results:
        return Booking(**record.results["booking"])

    with record.step("booking"), images.example.visitor("grace") as owner:
        name = book_for_now(site, owner)
        line = reservation(site, name)
        words = ("carme", "submit", "--reservation", name, "--time", "5m", *PROJECT, "--", "hostname")
        job = re.search(r"\d+", site.run("portal", *words, user="grace").stdout)
        assert job is not None
        state = ended(site, job[0])
        delete_booking(site, owner, name)
        result = Booking(line, state, True)
        record.keep("booking", asdict(result))
    return result


@pytest.fixture(scope="class")
def batch_job(images: Visit) -> str:
    """The state in which a batch job over both nodes ended that Carme submitted for a user."""
    record = images.record
    if record.is_done("batch job") and "batch job" in record.results:
        return record.results["batch job"]
    words = ["carme", "submit", "--nodes", "2", "--gpus", "1", "--time", "5m", *PROJECT, "--", "hostname"]
    with record.step("batch job"):
        job = re.search(r"\d+", images.site.run("portal", *words, user="alan").stdout)
        assert job is not None
        record.keep("batch job", ended(images.site, job[0]))
    return record.results["batch job"]


@pytest.fixture(scope="class")
def picture(images: Visit) -> list[str]:
    """The partitions that the portal offers; its picture is SITE-portal.png beside the record."""
    record, example = images.record, images.example
    if record.is_done("picture") and "picture" in record.results:
        return record.results["picture"]
    file = ARTIFACTS / f"{images.kind.name}-portal.png"
    address = images.site.machines["portal"].address
    with record.step("picture"):
        url = example.values["carme_site_url"]
        record.keep("picture", take_picture(file, url, address, "grace", example.passwords["grace"]))
    return record.results["picture"]


@pytest.fixture(scope="class")
def again(installed: Visit, request: pytest.FixtureRequest) -> Visit:
    """The page's installation once more, after users have worked."""
    attempt(request, "images", "main_job", "booking", "batch_job", "picture", "validated")
    (_check, *commands) = installed.example.commands("site.yml")
    for step, words in zip(AGAIN, commands, strict=True):
        installed.play(step, words)
    return installed


@pytest.fixture(scope="class")
def removed(prechecked: Visit, request: pytest.FixtureRequest) -> Visit:
    """Carme is taken away with its data, also where it was not installed to the end, and the site goes on."""
    attempt(request, "installed", "again")
    words = ["-i", str(prechecked.example.folder), "remove.yml", "-e", "removal_data=true"]
    prechecked.play("remove.yml refuses", words, code=2)
    leave_exporters_group(prechecked.site, NODES)
    prechecked.play("remove.yml", words)
    prechecked.remember("removed")
    prechecked.named = {name: prechecked.site.named(name, "*carme*") for name in prechecked.site.machines}
    return prechecked
