"""A Debian 12 site with a Slurm 22.05 of its own gets Carme as docs/admins/install.md says, and loses it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import install_page
import pytest
from portal_bookings import booked, confirm, send

from patience import HANG

from . import existing_22_05
from .conftest import Record
from .existing_22_05 import NODES
from .own_slurm_example import (
    Example,
    append_hooks,
    changed_hosts,
    findings,
    hide_processes,
    leave_exporters_group,
)
from .site_hosts import SiteHosts, wait_until

Run = subprocess.CompletedProcess[str]
Sums = dict[str, dict[str, str]]

#: What belongs to the site: all of its configuration, and what its own services serve.
SITE = ["/etc", "/srv/intranet", "/opt/apptainer-libc", "/usr/local"]
#: What docs/admins/install.md lists of it: Apptainer's configuration as its package brought it.
WRITTEN_BY_CARME = {"/etc/apptainer/apptainer.conf"}
#: What the administrators change themselves, on the nodes, as docs/admins/security.md says.
FSTAB = "/etc/fstab"
#: What changes with every package that is installed, and what Carme's own packages bring.
OF_PACKAGES = re.compile(
    r"/etc/(ld\.so\.cache|mailcap|(group|gshadow|passwd|shadow|subuid|subgid)-?|apt/.*|alternatives/.*|systemd/system/[^/]+\.wants/.*)$"
)
#: What is named after Carme and stays: what makes a host of a container, and where images are mounted.
OF_TESTS = {
    "/etc/carme-demo",
    "/etc/systemd/system/carme-demo-node.service",
    "/etc/systemd/system/sysinit.target.wants/carme-demo-node.service",
    "/etc/ssl/carme",
    "/etc/ssl/private/carme.pem",
    "/srv/carme",
    "/usr/local/sbin/carme-demo-node",
}
PROJECT = ["--account", "research", "--partition", "gpu"]


@dataclass
class Visit:
    """What the steps have left, for the tests to look at."""

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
            done = self.runs[step] = self.example.play(words, log=step)
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


@pytest.fixture(scope="session")
def visit(keep_site: bool, resume_site: bool) -> Iterator[Visit]:
    """The site as its administrators have it: Slurm works, Carme is not there."""
    record = Record("existing-22.05", resume_site)
    site = SiteHosts(existing_22_05.DESCRIPTION)
    try:
        if not record.is_done("slurm"):
            with record.step("hosts"):
                site.make()
            with record.step("slurm"):
                existing_22_05.set_up(site)
        record.versions = existing_22_05.versions(site)
        record.write()
        yield Visit(site, Example(site), record)
    finally:
        if not keep_site:
            site.destroy()


@pytest.fixture(scope="session")
def looked(visit: Visit) -> Visit:
    """The page's steps 1 to 3: described, looked at, done what it says, looked at again."""
    example = visit.example
    visit.remember("untouched")
    example.write(carme_head_address=visit.site.machines["portal"].address)
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


@pytest.fixture(scope="session")
def installed(looked: Visit) -> Visit:
    """Step 4, by the page's commands, and what comes after it on nodes that users share."""
    (_look, *commands) = looked.example.commands("site.yml")
    for number, words in enumerate(commands, 1):
        done = looked.play(f"site.yml {number}", words)
        assert done.returncode == 0, done.stdout[-4000:]
    if not looked.record.is_done("administrator"):
        with looked.record.step("administrator"):
            looked.example.add_administrator()
    looked.remember("after")
    if not looked.record.is_done("processes hidden"):
        with looked.record.step("processes hidden"):
            hide_processes(looked.site, NODES)
    return looked


@pytest.fixture(scope="session")
def validated(installed: Visit) -> Visit:
    """Step 5."""
    (words,) = installed.example.commands("validate.yml")
    installed.play("validate.yml", words)
    if "validation" not in installed.record.results:
        shown = installed.site.run("portal", "cat", "/var/log/carme/validation.json").stdout
        installed.record.keep("validation", json.loads(shown))
    return installed


@dataclass
class Booking:
    """What a booking was in Slurm, and which job ran in it."""

    reservation: str
    job: str
    released: bool


@pytest.fixture(scope="session")
def main_job(installed: Visit) -> dict[str, Any]:
    """The verdict of `carme validate --training`: a session over two nodes in which a model is trained."""
    site, example, record = installed.site, installed.example, installed.record
    if record.is_done("main job") and "main job" in record.results:
        return record.results["main job"]
    words = ["carme", "validate", "--training", "--json", "--user", "grace", "--password-file", "-"]
    words += ["--certificate", "/etc/ssl/certs/ca-certificates.crt", *PROJECT]
    with installed.record.step("main job"):
        done = site.run(
            "portal", *words, user="grace", data=example.passwords["grace"] + "\n", check=False, timeout=1800
        )
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        record.keep("main job", json.loads(done.stdout))
    return record.results["main job"]


@pytest.fixture(scope="session")
def booking(installed: Visit) -> Booking:
    """A booking that begins at once, with a job of its owner in it."""
    site, record = installed.site, installed.record
    if record.is_done("booking") and "booking" in record.results:
        return Booking(**record.results["booking"])

    def reservation(name: str) -> str:
        shown = ("scontrol", "--oneliner", "show", "reservation", name)
        return site.run("portal", *shown, check=False).stdout

    with installed.record.step("booking"), installed.example.visitor("grace") as owner:

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


@pytest.fixture(scope="session")
def batch_job(installed: Visit) -> str:
    """The state in which a batch job over both nodes ended that Carme submitted for a user."""
    record = installed.record
    if record.is_done("batch job") and "batch job" in record.results:
        return record.results["batch job"]
    words = ["carme", "submit", "--nodes", "2", "--gpus", "1", "--time", "5m", *PROJECT, "--", "hostname"]
    with installed.record.step("batch job"):
        job = re.search(r"\d+", installed.site.run("portal", *words, user="alan").stdout)
        assert job is not None
        record.keep("batch job", ended(installed.site, job[0]))
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


@pytest.fixture(scope="session")
def again(validated: Visit, main_job: dict[str, Any], booking: Booking, batch_job: str) -> Visit:
    """The page's installation once more, after users have worked."""
    (_look, *commands) = validated.example.commands("site.yml")
    for number, words in enumerate(commands, 1):
        validated.play(f"again: site.yml {number}", words)
    return validated


@pytest.fixture(scope="session")
def removed(again: Visit) -> Visit:
    """Carme is taken away with its data, and the site goes on."""
    words = ["-i", str(again.example.folder), "remove.yml", "-e", "removal_data=true"]
    again.play("remove.yml refuses", words, code=2)
    leave_exporters_group(again.site, NODES)
    again.play("remove.yml", words)
    again.remember("removed")
    again.named = {name: again.site.named(name, "*carme*") for name in again.site.machines}
    return again


def test_the_first_look_says_what_to_set_and_changes_nothing(looked: Visit) -> None:
    look = looked.runs["first look"]
    assert look.returncode == 2
    shown = findings(look.stdout)
    assert "Set carme_homes to the folders below which all homes lie" in shown
    assert "Prolog does not call /usr/libexec/carme/prolog" in shown
    for name in NODES:
        assert f"{name}.example.org, processes of others: /proc is mounted without hidepid" in shown
    assert all(counts["changed"] == 0 for counts in changed_hosts(look.stdout).values())
    assert looked.changed("untouched", "first look") == {name: set() for name in looked.site.machines}


def test_after_what_it_says_nothing_stands_in_the_way(looked: Visit) -> None:
    look = looked.runs["second look"]
    assert look.returncode == 0, look.stdout[-4000:]
    assert "Prolog does not call" not in look.stdout and "hidepid" not in look.stdout
    assert all(counts["changed"] == 0 for counts in changed_hosts(look.stdout).values())


def test_the_site_keeps_what_belongs_to_it(installed: Visit) -> None:
    changed = installed.changed("before", "after")
    assert {name: paths - WRITTEN_BY_CARME for name, paths in changed.items()} == {
        name: set() for name in changed
    }
    assert {"/etc/slurm/slurm.conf", "/etc/slurm/prolog", "/etc/munge/munge.key"} <= set(
        installed.sums["before"]["ctl"]
    )
    assert "/etc/nginx/nginx.conf" in installed.sums["before"]["portal"]
    page = installed.site.run(
        "portal", "curl", "--silent", "--header", "Host: intranet.example.org", "http://127.0.0.1:8080/"
    )
    assert page.stdout == "The site's own page.\n"


def test_the_sites_own_slurm_is_what_runs(installed: Visit) -> None:
    assert installed.record.versions["slurm"].startswith("22.05")
    shown = installed.site.run(
        "portal", "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %t"
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == list(NODES)
    assert "drain" not in shown and "down" not in shown


def test_users_of_a_node_see_their_own_processes_and_the_exporter_sees_all(installed: Visit) -> None:
    for name in NODES:
        # As at the next boot: with the options of /etc/fstab alone.
        installed.site.run(name, "mount", "-o", "remount", "/proc")
        for user, sees in {"alan": False, "carme-exporter": True}.items():
            words = ("runuser", "-u", user, "--", "test", "-e", "/proc/1/cmdline")
            seen = installed.site.run(name, *words, check=False).returncode == 0
            assert seen == sees, (name, user)


def test_the_sites_own_check_passes(validated: Visit) -> None:
    done = validated.runs["validate.yml"]
    verdict = validated.record.results["validation"]
    assert verdict["ok"], [check for check in verdict["checks"] if not check["ok"]]
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_user_trains_a_model_over_two_nodes_from_the_browser(main_job: dict[str, Any]) -> None:
    assert main_job["ok"], [check for check in main_job["checks"] if not check["ok"]]
    assert len(main_job["training"]["hosts"]) == 2
    assert main_job["training"]["accuracy"] > 0.95


def test_a_booking_is_a_reservation_of_its_owner(booking: Booking) -> None:
    assert "Users=grace " in booking.reservation
    assert booking.job.split("|") == ["COMPLETED", "research", "gpu"]


def test_a_batch_job_runs_on_two_nodes(batch_job: str) -> None:
    assert batch_job.split("|") == ["COMPLETED", "research", "gpu"]


def test_a_second_run_changes_nothing(again: Visit) -> None:
    for step, done in again.runs.items():
        if step.startswith("again"):
            assert done.returncode == 0, done.stdout[-4000:]
            assert {counts["changed"] for counts in changed_hosts(done.stdout).values()} == {0}, step


def test_removal_stops_before_a_boot_would_show_processes_again(removed: Visit) -> None:
    refused = removed.runs["remove.yml refuses"]
    assert refused.returncode == 2
    assert "Nothing has been removed. /etc/fstab" in findings(refused.stdout)
    assert all(counts["changed"] == 0 for counts in changed_hosts(refused.stdout).values())


def test_removal_leaves_the_site_as_it_was(removed: Visit) -> None:
    done = removed.runs["remove.yml"]
    assert done.returncode == 0, done.stdout[-4000:]
    for name in removed.site.machines:
        assert not removed.site.left_of_services(name)
    changed = removed.changed("before", "removed")
    assert {name: paths - {FSTAB} for name, paths in changed.items()} == {name: set() for name in changed}
    for name in NODES:
        removed.site.run(name, "mount", "-o", "remount", "/proc")  # as at the next boot
        words = ("runuser", "-u", "alan", "--", "test", "-e", "/proc/1/cmdline")
        assert removed.site.run(name, *words, check=False).returncode != 0, name
    mounted = {"portal": {"/var/cache/carme"}}
    assert {name: left - OF_TESTS - mounted.get(name, set()) for name, left in removed.named.items()} == {
        name: set() for name in removed.site.machines
    }


def test_the_site_works_without_carme(removed: Visit) -> None:
    words = ("srun", *PROJECT, "--nodes=2", "--gres=gpu:1", "hostname")
    assert sorted(removed.site.run("portal", *words, user="grace").stdout.split()) == sorted(NODES)


def test_all_commands_of_the_example_are_run(removed: Visit) -> None:
    known = [*removed.example.commands("site.yml"), *removed.example.commands("validate.yml")]
    assert len(known) == len(install_page.commands("own-slurm"))
