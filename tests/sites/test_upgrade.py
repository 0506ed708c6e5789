"""`site.yml` of a newer version over the one that is there, while a session, a job and a booking are.

And then the head is lost, and a new one gets its backup, while they go on.

    sudo ./test sites upgrade

On hosts of its own, beside the demo cluster. They get the last version that has a tag, or this one where none
has. With CARME_UPGRADE_OPTIONS the playbook of the newer version gets further options, such as
`--skip-tags images` where building images is not the point.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from portal_bookings import booked, confirm, send

from carme.backup.main import CERTIFICATE, STARTED
from carme.validation import NotebookKernel, Visitor
from carme_demo.deployment import Deployment, source_files
from carme_demo.nodes import Nodes
from carme_demo.registries import Registries
from carme_demo.settings import Places
from carme_demo.status import wait as wait_for_services
from demo_site import ROOT, DemoSite, wait_until
from patience import HANG

from .record import Record

RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "release"), run_name="release")
#: The hosts' name, port and network, which neither the demo nor another site has.
NAME = "upgrade"
OWN = ("--port", "8453", "--subnet", "10.80.0.0/24")
MIGRATIONS = "webui/src/carme_webui/accounts/migrations"
#: A table more, and the way back.
MIGRATION = """from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("accounts", "{before}")]
    operations = [
        migrations.RunSQL("CREATE TABLE upgrade_trial (id integer)", "DROP TABLE upgrade_trial")
    ]
"""
VENV = "/opt/carme/venv/bin"
PORTAL = ["runuser", "-u", "carme-portal", "--", f"{VENV}/carme-portal"]
#: Images may be built anew.
LONGEST = 3600


def released_tree(folder: Path) -> Path:
    """The source tree of the last version that has a tag; this one where none has."""
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    tags = [*git, "tag", "--list", "v[0-9]*", "--merged", "HEAD", "--sort=-version:refname"]
    listed = subprocess.run(tags, capture_output=True, text=True, check=False, timeout=60)
    if listed.returncode or not listed.stdout.strip():  # also a tree that is not a checkout
        return ROOT
    archive = [*git, "archive", listed.stdout.split()[0]]
    content = subprocess.run(archive, capture_output=True, check=True, timeout=300).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        packed.extractall(folder, filter="data")
    return folder


@dataclass(frozen=True)
class Newer:
    """A source tree whose version is one higher than the hosts' and this one's, with one migration more.

    Attributes:
        added: The migration.
    """

    root: Path
    version: str
    added: str


def newer_tree(folder: Path, installed: str) -> Newer:
    """Make it of this tree.

    Args:
        folder: Where it goes.
        installed: The version of the hosts.
    """
    for name in source_files(ROOT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    version = RELEASE["version_of"](ROOT)
    highest = max((version, installed), key=lambda text: [int(part) for part in text.split(".")])
    first, _, last = highest.rpartition(".")
    higher = f"{first}.{int(last) + 1}"
    for file in (*(f"{part}/pyproject.toml" for part in RELEASE["PARTS"]), *RELEASE["MODULES"]):
        text = (folder / file).read_text()
        (folder / file).write_text(
            text.replace(f'version = "{version}"', f'version = "{higher}"', 1).replace(
                f'__version__ = "{version}"', f'__version__ = "{higher}"'
            )
        )
    assert RELEASE["version_of"](folder) == higher
    before = max(file.stem for file in (folder / MIGRATIONS).glob("0*.py"))
    added = f"{int(before[:4]) + 1:04}_upgrade_trial"
    (folder / MIGRATIONS / f"{added}.py").write_text(MIGRATION.format(before=before))
    return Newer(folder, higher, added)


def install(demo: DemoSite, root: Path, *more: str) -> None:
    """Bring a source tree to the head and run its playbook, as `./demo up` does, with `more` options."""
    places = Places(NAME)
    nodes = Nodes(demo.podman, places, demo.settings, Registries())
    deployment = Deployment(root, demo.podman, places, demo.settings, nodes)
    deployment.copy()
    options = os.environ.get("CARME_UPGRADE_OPTIONS", "").split()
    done = demo.run("head", *deployment.command(), *options, *more, check=False, timeout=LONGEST)
    (places.log / "upgrade.log").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]


def states(demo: DemoSite) -> set[str]:
    """Those of the head's services, in systemd's words, one for each of them."""
    shown = demo.run("head", "systemctl", "is-active", *STARTED, check=False).stdout.split()
    assert len(shown) == len(STARTED), shown
    return set(shown)


def wait_until_ready(demo: DemoSite) -> None:
    """As `./demo up` does when its playbook has ended, which must have started the services by itself."""
    assert states(demo) <= {"active", "activating"}
    names = {machine.name for machine in demo.settings.machines()}
    seen = wait_for_services(demo.podman, Places(NAME), demo.settings, names, HANG)
    assert seen.ready, seen.problems


@dataclass
class Life:
    """What goes on while the site is brought up to date."""

    demo: DemoSite
    visitor: Visitor
    kernel: NotebookKernel
    session: str
    node: str
    job: int
    booking: str
    booked_job: int
    secret: str

    def processes(self) -> set[str]:
        """Those of the session's owner on its node by number and name; not what comes and goes."""
        shown = self.demo.run(self.node, "ps", "-u", self.demo.user, "-o", "pid=,comm=").stdout
        return {line for line in shown.splitlines() if not line.endswith(" sleep")}

    def slurm(self, what: str, name: str) -> dict[str, str]:
        """What Slurm says of a job or a reservation, without what changes by itself."""
        line = self.demo.run("head", "scontrol", "--oneliner", "show", what, name).stdout
        stable = ("JobState", "StartTime", "EndTime", "Restarts", "NodeList", "Nodes", "Users", "Account")
        return {key: value for key, value in re.findall(r"(\w+)=(\S*)", line) if key in stable}

    def counted(self) -> list[str]:
        """What the job has written: a number each second, each once."""
        return self.demo.run("head", "cat", f"/home/{self.demo.user}/{self.secret}").stdout.split()


def give_back(demo: DemoSite, visitor: Visitor, booking: str) -> None:
    """Delete a booking that is still there; one that is over hides no other failure."""
    shown = demo.run("head", "scontrol", "show", "reservation", booking, check=False)
    if shown.returncode == 0:
        confirm(visitor, f"bookings/{booking}/delete/")


def submit(demo: DemoSite, commands: str, *options: str) -> int:
    """Have Slurm run a shell's commands in the user's home; the job's number."""
    words = ["sbatch", "--parsable", "--output=/dev/null", "--mem=100", f"--chdir=/home/{demo.user}"]
    return int(demo.run("head", *words, *options, f"--wrap={commands}", user=demo.user).stdout)


@pytest.fixture(scope="module")
def record(resume_site: bool) -> Record:
    return Record("upgrade", resume_site)


@pytest.fixture(scope="module")
def demo(
    record: Record, keep_site: bool, resume_site: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DemoSite]:
    """The hosts, with the released version."""
    try:
        if not record.is_done("site.yml"):
            if not resume_site:
                remove_hosts()
            released = released_tree(tmp_path_factory.mktemp("released"))
            up = [str(released / "demo"), "up", "--no-run", "--name", NAME, *OWN]
            with record.step("site.yml") as noted:
                noted["version"] = RELEASE["version_of"](released)
                subprocess.run(up, check=True, timeout=2 * LONGEST)
        yield DemoSite(name=NAME)
    finally:
        if keep_site:
            Places(NAME).deployed.unlink(missing_ok=True)  # they have what `./demo up` has not installed
        else:
            remove_hosts()


def remove_hosts() -> None:
    """Take them and their data away; what was downloaded or built stays for the next time."""
    if Places(NAME).settings.exists():
        subprocess.run([str(ROOT / "demo"), "reset", "--name", NAME], check=True, timeout=600)


@pytest.fixture(scope="module")
def life(demo: DemoSite) -> Iterator[Life]:
    secret = f"upgrade-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as open_:
        # Last of all: the job writes to it until it has ended.
        open_.callback(demo.run, "head", "rm", "-f", f"/home/{demo.user}/{secret}")
        open_.callback(demo.end_all_jobs)
        visitor = open_.enter_context(demo.visitor(demo.user))
        form = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "480", "title": "Upgrade"}
        session = visitor.start(form)
        visitor.wait(session, "ready", HANG)
        kernel = open_.enter_context(visitor.kernel(visitor.open(session)))
        assert kernel.run(f"variable = {secret!r}", timeout=HANG).ok
        node = demo.job_of(session)["node_list"]
        count = f"i=0; while :; do i=$((i+1)); echo $i >>{secret}; sleep 1; done"
        job = submit(demo, count, f"--nodelist={node}", "--time=8:00:00")
        day, clock = demo.run("head", "date", "--utc", "--date=3 minutes", "+%Y-%m-%d %H:%M").stdout.split()
        # The playbook, which runs three times, may take an hour each time before anybody looks at it.
        booking = booked(send(visitor, date=day, time=clock, length="5h"))
        open_.callback(give_back, demo, visitor, booking)
        open_.callback(demo.end_all_jobs)  # a reservation with jobs cannot be deleted
        # A booking in which nothing runs is given back.
        booked_job = submit(demo, "sleep infinity", f"--reservation={booking}", "--time=4:30:00")
        life = Life(demo, visitor, kernel, session, node, job, booking, booked_job, secret)
        wait_until(
            "the job counts",
            lambda: (
                demo.run("head", "test", "-s", f"/home/{demo.user}/{secret}", check=False).returncode == 0
            ),
        )
        yield life


@dataclass(frozen=True)
class Before:
    """What was there, to compare with."""

    newer: Newer
    processes: set[str]
    job: dict[str, str]
    booking: dict[str, str]
    counted: int


@pytest.fixture(scope="module")
def before(demo: DemoSite, life: Life, record: Record, tmp_path_factory: pytest.TempPathFactory) -> Before:
    """The newer version is installed."""
    installed = demo.run("head", f"{VENV}/carme", "--version").stdout.split()[1]
    newer = newer_tree(tmp_path_factory.mktemp("newer"), installed)
    known = Before(
        newer, life.processes(), life.slurm("job", str(life.job)), life.slurm("reservation", life.booking),
        len(life.counted()),
    )  # fmt: skip
    with record.step("site.yml of the newer version") as noted:
        noted["version"] = newer.version
        install(demo, newer.root)
        wait_until_ready(demo)
    return known


def test_every_host_has_the_newer_version_and_its_tables(demo: DemoSite, before: Before) -> None:
    for machine in demo.settings.machines():
        shown = demo.run(machine.name, f"{VENV}/carme", "--version").stdout
        assert shown == f"carme {before.newer.version}\n", machine.name
    shown = demo.run("head", *PORTAL, "showmigrations", "accounts").stdout
    assert f"[X] {before.newer.added}" in shown


def test_the_session_keeps_its_server_and_its_variables(life: Life, before: Before) -> None:
    assert before.processes and before.processes <= life.processes()
    assert life.visitor.session(life.session).state == "ready"
    life.kernel.connect()
    shown = life.kernel.run("print(variable)", timeout=HANG)
    assert (shown.output.strip(), shown.error) == (life.secret, "")
    assert life.visitor.open(life.session)


def test_the_job_goes_on_as_the_same(life: Life, before: Before) -> None:
    assert life.slurm("job", str(life.job)) == before.job
    assert (before.job["JobState"], before.job["Restarts"]) == ("RUNNING", "0")
    counted = life.counted()
    assert len(counted) > before.counted
    assert counted == [str(number + 1) for number in range(len(counted))]
    assert life.job in life.demo.job_ids()


def test_the_booking_begins_when_it_was_to(life: Life, before: Before) -> None:
    assert life.slurm("reservation", life.booking) == before.booking
    assert before.booking["Users"] == life.demo.user
    show = ("scontrol", "--oneliner", "show", "reservation", life.booking)
    wait_until(
        "the booking has begun",
        lambda: "State=ACTIVE" in life.demo.run("head", *show).stdout,
        timeout=180 + HANG,
    )
    wait_until("its job runs", lambda: life.slurm("job", str(life.booked_job))["JobState"] == "RUNNING")
    page = life.visitor.fetch(f"{life.visitor.url}bookings/{life.booking}/")
    assert page.status_code == 200 and life.booking in str(page.url)


def test_a_new_session_starts_with_the_newer_version(life: Life, before: Before) -> None:
    form = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "10", "title": "After"}
    session = life.visitor.start(form)
    life.visitor.wait(session, "ready", HANG)
    life.visitor.stop(session)
    life.visitor.wait(session, "ended", HANG)


@pytest.fixture(scope="module")
def restored(demo: DemoSite, life: Life, before: Before, record: Record) -> None:
    """All that Carme's head knew is gone, and a backup of it is restored as docs/admins/backup.md says."""
    program, key, backup = f"{VENV}/carme-backup", "/root/carme-backup.key", "/root/carme-backup"
    if demo.run("head", "test", "-e", key, check=False).returncode:
        demo.run("head", program, "key", key)
    demo.run("head", "rm", "-f", backup)
    with record.step("backup"):
        demo.run("head", program, "create", "--key", key, backup, timeout=LONGEST)
        demo.run("head", program, "check", "--key", key, backup, timeout=LONGEST)
    demo.run("head", "systemctl", "stop", *STARTED)
    lost = "rm -rf /etc/carme /var/lib/carme /var/log/carme/audit.jsonl*"
    demo.run("head", "sh", "-ec", lost)
    with record.step("site.yml on a head that awaits its backup"):
        install(demo, before.newer.root, "-e", "carme_awaits_restore=true")
    assert states(demo) <= {"inactive", "failed"}
    with record.step("restore"):
        demo.run("head", program, "restore", "--key", key, backup, timeout=LONGEST)
        demo.run("head", "systemctl", "start", CERTIFICATE)
    with record.step("site.yml after the restore"):
        install(demo, before.newer.root)
        wait_until_ready(demo)


@pytest.mark.usefixtures("restored")
def test_a_head_with_a_restored_backup_knows_what_goes_on(life: Life, before: Before) -> None:
    # With the certificate, the signed-in browser and the kernel of before.
    life.visitor.wait(life.session, "ready", HANG)
    assert before.processes <= life.processes()
    life.kernel.connect()
    shown = life.kernel.run("print(variable)", timeout=HANG)
    assert (shown.output.strip(), shown.error) == (life.secret, "")
    assert life.slurm("job", str(life.job)) == before.job
    assert life.slurm("job", str(life.booked_job))["JobState"] == "RUNNING"
    assert life.slurm("reservation", life.booking) == before.booking
    page = life.visitor.fetch(f"{life.visitor.url}bookings/{life.booking}/")
    assert page.status_code == 200 and life.booking in str(page.url)
    with life.demo.visitor(life.demo.user) as visitor:
        assert visitor.session(life.session).state == "ready"
