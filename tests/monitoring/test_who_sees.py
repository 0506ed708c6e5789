"""Users see the series of their own jobs, managers their project's, administrators all; on the demo."""

import os
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from bs4 import BeautifulSoup

from carme.validation import Visitor
from demo_site import DemoSite, wait_until

# Of this run alone: what Slurm has counted of an account stays with it.
NAME = f"seen-{os.urandom(4).hex()}"
ACCOUNT, PAGE = f"carme-{NAME}", f"projects/at/{NAME}/"
QUERY = quote("carme_job_info")


def send(visitor: Visitor, page: str, form: str = "", **values: str) -> None:
    """Send a form of a page: the one that this selector finds, else the one that has the first field."""
    shown = visitor.fetch(f"{visitor.url}{page}")
    found = BeautifulSoup(shown.text, "html.parser").select_one(form) if form else None
    found = found or visitor.form(shown, next(iter(values)))
    assert visitor.send(shown, found, values).status_code == 200


def jobs(visitor: Visitor, where: str) -> set[int] | None:
    """The numbers of the jobs whose series a user gets; None: refused."""
    answer = visitor.fetch(f"{visitor.url}metrics/{where}/api/v1/query?query={QUERY}")
    if answer.status_code == 403:
        return None
    return {int(series["metric"]["jobid"]) for series in answer.json()["data"]["result"]}


@pytest.fixture
def project(demo: DemoSite) -> Iterator[str]:
    """A project that user1 manages and user2 is a member of."""
    with demo.visitor("admin") as admin:
        send(admin, "projects/new/", name=NAME, title="Seen", manager="user1")
        with demo.visitor("user1") as manager, demo.visitor("user2") as member:
            send(manager, PAGE, user="user2")
            send(member, "projects/", 'form[action^="/projects/invitations/"]', answer="yes")
        yield ACCOUNT
        demo.end_all_jobs()
        send(admin, PAGE, f'form[action="/{PAGE}state/"]', do="close")


def test_each_sees_what_is_theirs(demo: DemoSite, project: str) -> None:
    def submit(user: str, account: str) -> int:
        options = ("--parsable", f"--account={account}", "--time=10", "--mem=100", "--output=/dev/null")
        words = ("sbatch", *options, "--chdir=/", "--wrap=sleep 500")
        wait_until(
            f"{user} may run in {account}",
            lambda: (
                demo.run("head", "sbatch", "--test-only", *words[2:], user=user, check=False).returncode == 0
            ),
        )
        return int(demo.run("head", *words, user=user).stdout)

    of_member, private, of_manager = (
        submit("user2", project),
        submit("user2", "carme"),
        submit("user1", "carme"),
    )
    everything = {of_member, private, of_manager}
    with demo.visitor("admin") as admin, demo.visitor("user1") as manager, demo.visitor("user2") as member:
        wait_until("all jobs have been seen", lambda: everything <= (jobs(admin, "all") or set()))
        for user, where, visible in (
            (member, "mine", {of_member, private}),
            (manager, "mine", {of_manager}),
            (manager, f"account/{project}", {of_member}),
            (admin, f"account/{project}", {of_member}),
        ):
            assert everything & (jobs(user, where) or set()) == visible
        assert jobs(member, f"account/{project}") is None
        for user in (manager, member):
            assert jobs(user, "all") is None and jobs(user, "account/carme") is None
