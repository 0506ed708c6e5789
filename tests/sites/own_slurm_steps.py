"""A site with a Slurm of its own gets Carme as docs/admins/install.md says, and loses it: the steps.

Each is a fixture of a class of tests, which says with SITE which site it is about.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from portal_bookings import booked, confirm, send

from patience import HANG

from .existing_slurm import NODES, ExistingSlurm, versions
from .own_slurm_example import Example, append_hooks, findings, hide_processes, leave_exporters_group
from .record import Record, attempt, slowest_tasks
from .site_hosts import SiteHosts, wait_until

Run = subprocess.CompletedProcess[str]
Sums = dict[str, dict[str, str]]

#: What belongs to the site: all of its configuration, and what its own services serve.
SITE = ["/etc", "/srv/intranet", "/opt/apptainer-libc", "/usr/local"]
#: What changes with every package that is installed, and what Carme's own packages bring.
OF_PACKAGES = re.compile(
    r"/etc/(ld\.so\.cache|mailcap|(group|gshadow|passwd|shadow|subuid|subgid)-?|apt/.*|alternatives/.*|systemd/system/[^/]+\.wants/.*)$"
)
#: The steps that install Carme once more.
AGAIN = ("site.yml again", "images again")
PROJECT = ["--account", "research", "--partition", "gpu"]


@dataclass
class Visit:
    """What the steps have left, for the tests to look at."""

    kind: ExistingSlurm
    site: SiteHosts
    example: Example
    record: Record
    runs: dict[str, Run] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    named: dict[str, set[str]] = field(default_factory=dict)

    def play(self, step: str, words: list[str], code: int = 0) -> Run:
        """Run a playbook, or read its output when an earlier run has done this step."""
        log = self.site.places.log / f"{step}.log"
        if self.record.is_done(step) and log.exists():
            self.runs[step] = subprocess.CompletedProcess(words, code, log.read_text())
            return self.runs[step]
        with self.record.step(step, code) as noted:
            try:
                done = self.runs[step] = self.example.play(words, log=step)
            finally:
                noted["slowest"] = slowest_tasks(self.site.times_of(step))
            noted["code"] = done.returncode
        return done

    def remember(self, when: str) -> None:
        """Take the checksums of what belongs to the site, or those that an earlier run has taken."""
        file = self.site.places.state / "checksums" / f"{when}.json"
        if self.record.resumed and file.exists():
            self.sums[when] = json.loads(file.read_text())
            return
        self.sums[when] = {name: self.site.checksums(name, SITE) for name in self.site.machines}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.sums[when]))

    def changed(self, before: str, after: str) -> dict[str, set[str]]:
        """Files that are not as they were, by host; new ones are not among them."""
        return {
            name: {
                path
                for path, known in sums.items()
                if self.sums[after][name].get(path) != known and not OF_PACKAGES.match(path)
            }
            for name, sums in self.sums[before].items()
        }


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
        yield Visit(kind, site, Example(site), record)
    finally:
        if not keep_site:
            with record.step("hosts taken away"):
                site.destroy()


@pytest.fixture(scope="class")
def looked(visit: Visit) -> Visit:
    """The page's steps 1 to 3: described, looked at, done what it says, looked at again."""
    example = visit.example
    visit.remember("untouched")
    example.write(carme_head_address=visit.site.machines["portal"].address, **visit.kind.variables)
    (look, *_rest) = example.commands("site.yml")
    visit.play("first look", look, code=2)
    visit.remember("first look")
    if not visit.record.is_done("hooks"):
        with visit.record.step("hooks"):
            append_hooks(visit.site, "/etc/slurm")
            hiding = re.search(
                r"'(mount -o remount,[^']*)'+ hides them at once", findings(visit.runs["first look"].stdout)
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
    visit.play("second look", look)
    visit.remember("before")
    return visit


@pytest.fixture(scope="class")
def installed(looked: Visit) -> Visit:
    """Step 4 without images, by the page's commands, and what comes after it on nodes that users share."""
    (_look, words, _images) = looked.example.commands("site.yml")
    done = looked.play("site.yml without images", words)
    assert done.returncode == 0, done.stdout[-4000:]
    if not looked.record.is_done("administrator"):
        with looked.record.step("administrator"):
            looked.example.add_administrator()
    looked.remember("after")
    if not looked.record.is_done("processes hidden"):
        with looked.record.step("processes hidden"):
            hide_processes(looked.site, NODES)
    looked.record.versions = versions(looked.site)
    looked.record.write()
    return looked


@pytest.fixture(scope="class")
def images(installed: Visit) -> Visit:
    """The images, by the page's last command of step 4; their layers serve the next site of this cache."""
    (_look, _site, words) = installed.example.commands("site.yml")
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
    images.play("validate.yml", words)
    if "validation" not in images.record.results:
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

    def reservation(name: str) -> str:
        shown = ("scontrol", "--oneliner", "show", "reservation", name)
        return site.run("portal", *shown, check=False).stdout

    with record.step("booking"), images.example.visitor("grace") as owner:

        def answer() -> Any:
            day, clock = site.run("portal", "date", "--utc", "+%Y-%m-%d %H:%M").stdout.split()
            answer = send(owner, date=day, time=clock)
            return None if "cannot begin in the past" in answer.text else answer

        name = booked(wait_until("a form was sent within a minute", answer, HANG))
        wait_until("it has begun", lambda: "State=ACTIVE" in reservation(name), HANG)
        line = reservation(name)
        words = ("carme", "submit", "--reservation", name, "--time", "5m", *PROJECT, "--", "hostname")
        job = re.search(r"\d+", site.run("portal", *words, user="grace").stdout)
        assert job is not None
        state = ended(site, job[0])
        confirm(owner, f"bookings/{name}/delete/")
        wait_until(
            "the node is given back", lambda: f"ReservationName={name} " not in reservation(name), HANG
        )
        made = Booking(line, state, True)
        record.keep("booking", asdict(made))
    return made


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


def ended(site: SiteHosts, job: str) -> str:
    """The state in which a job ended."""
    query = (
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={job}",
        "--format=State,Account,Partition",
    )

    def line() -> str:
        shown = site.run("ctl", *query).stdout.strip()
        state, *rest = shown.split("|")
        # The accounting may learn of the end before it has all of the beginning.
        return shown if state not in ("PENDING", "RUNNING") and all(rest) and state else ""

    return wait_until(f"job {job} has ended", line, HANG)


@pytest.fixture(scope="class")
def again(installed: Visit, request: pytest.FixtureRequest) -> Visit:
    """The page's installation once more, after users have worked."""
    attempt(request, "images", "main_job", "booking", "batch_job", "validated")
    (_look, *commands) = installed.example.commands("site.yml")
    for step, words in zip(AGAIN, commands, strict=True):
        installed.play(step, words)
    return installed


@pytest.fixture(scope="class")
def removed(looked: Visit, request: pytest.FixtureRequest) -> Visit:
    """Carme is taken away with its data, also where it was not installed to the end, and the site goes on."""
    attempt(request, "installed", "again")
    words = ["-i", str(looked.example.folder), "remove.yml", "-e", "removal_data=true"]
    looked.play("remove.yml refuses", words, code=2)
    leave_exporters_group(looked.site, NODES)
    looked.play("remove.yml", words)
    looked.remember("removed")
    looked.named = {name: looked.site.named(name, "*carme*") for name in looked.site.machines}
    return looked
