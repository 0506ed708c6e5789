"""A project from the portal to Slurm: its members run jobs within its limits, removed members run none."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from bs4 import BeautifulSoup, Tag

from carme.validation import Visitor
from demo_site import DemoSite, wait_until

# Of this run alone: what Slurm has counted of an account stays with it.
NAME = f"test-{os.urandom(4).hex()}"
ACCOUNT = f"carme-{NAME}"
PAGE = f"projects/at/{NAME}/"


def send(visitor: Visitor, page: str, address: str, **values: str) -> None:
    """Send the form of a page that goes to this address."""
    shown = visitor.fetch(f"{visitor.url}{page}")
    found = BeautifulSoup(shown.text, "html.parser").select_one(f'form[action="/{address}"]')
    if not isinstance(found, Tag):
        found = visitor.form(shown, next(iter(values)))
    answer = visitor.send(shown, found, values)
    assert answer.status_code == 200, answer.text


def members(demo: DemoSite) -> set[str]:
    """The users who may run jobs in the account by Slurm's database."""
    where = ["where", f"account={ACCOUNT}", "format=user,maxsubmit"]
    reported = demo.run("head", "sacctmgr", "--noheader", "--parsable2", "show", "association", *where).stdout
    rows = [line.split("|") for line in reported.splitlines()]
    return {user for user, most in rows if user and most != "0"}


def members_are(demo: DemoSite, *users: str) -> None:
    """Wait until Slurm lets these run, and nobody else: when it is busy, the portal asks it again later."""
    wait_until(f"the members are {users}", lambda: members(demo) == set(users))


def submit(demo: DemoSite, user: str, *options: str) -> Any:
    """Submit with Slurm's own sbatch, without Carme."""
    words = ["sbatch", "--parsable", f"--account={ACCOUNT}", "--time=2", "--mem=100", *options]
    return demo.run("head", *words, "--output=/dev/null", "--wrap=sleep 100", user=user, check=False)


def job(demo: DemoSite, number: str) -> tuple[str, str]:
    """A job's state, and why it waits."""
    reported = demo.run("head", "squeue", "--noheader", f"--jobs={number}", "--format=%T %r").stdout.split()
    return (reported[0], reported[1]) if reported else ("", "")


@pytest.fixture
def no_project_left(demo: DemoSite) -> Iterator[None]:
    yield
    demo.end_all_jobs()
    with demo.visitor("admin") as admin:
        page = admin.fetch(f"{admin.url}{PAGE}")
        if page.status_code == 200:
            send(admin, PAGE, f"{PAGE}state/", do="close")


@pytest.mark.alone
@pytest.mark.usefixtures("no_project_left")
def test_slurm_enforces_what_the_portal_says_of_a_project(demo: DemoSite) -> None:
    with demo.visitor("admin") as admin, demo.visitor("user1") as manager, demo.visitor("user2") as member:
        send(admin, "projects/new/", "projects/new/", name=NAME, title="Cluster test", manager="user1")
        send(admin, f"{PAGE}limits/", f"{PAGE}limits/", gpus="1", jobs="1")
        members_are(demo, "user1")
        assert submit(demo, "user2").returncode != 0, "who is not a member runs nothing"
        assert member.fetch(f"{member.url}{PAGE}").status_code == 404

        send(manager, PAGE, PAGE, user="user2")
        assert members(demo) == {"user1"}, "nobody is a member who has not agreed"
        shown = member.fetch(f"{member.url}projects/")
        form = BeautifulSoup(shown.text, "html.parser").select_one('form[action^="/projects/invitations/"]')
        assert form is not None
        member.send(shown, form, {"answer": "yes"})
        members_are(demo, "user1", "user2")

        # Two GPUs are more than the project may use at a time; one is not, but then it has one job already.
        assert "AssocGrpGRES" in wait_for_reason(demo, submit(demo, "user2", "--gres=gpu:2"))
        demo.run("head", "scancel", f"--account={ACCOUNT}")
        first = submit(demo, "user2", "--gres=gpu:1").stdout.strip()
        wait_until("the first job runs", lambda: job(demo, first)[0] == "RUNNING")
        assert "AssocGrp" in wait_for_reason(demo, submit(demo, "user1"))

        send(manager, PAGE, f"{PAGE}members/user2/", do="remove")
        members_are(demo, "user1")
        assert submit(demo, "user2").returncode != 0, "who was taken out runs nothing"
        assert member.fetch(f"{member.url}{PAGE}").status_code == 404


def wait_for_reason(demo: DemoSite, submitted: Any) -> str:
    """Slurm's reason why a job waits, or its message if it refused the job."""
    if submitted.returncode:
        return submitted.stderr
    number = submitted.stdout.strip()

    def reason() -> str:
        state, why = job(demo, number)
        assert state == "PENDING", (state, why)
        return why if why not in ("None", "Priority") else ""

    return str(wait_until("Slurm says why the job waits", reason))
