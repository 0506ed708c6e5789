"""What administrators do on their pages, in Slurm: maintenance, nodes, jobs, words to users, new users."""

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from bs4 import BeautifulSoup

from carme.validation import Visitor
from demo_site import DemoSite, wait_until
from patience import HANG

pytestmark = pytest.mark.alone


def send(visitor: Visitor, page: str, field: str, **values: str) -> str:
    """Send the form of a page that has this field; the text of the answer."""
    shown = visitor.fetch(f"{visitor.url}{page}")
    answer = visitor.send(shown, visitor.form(shown, field), values)
    assert answer.status_code == 200, answer.text
    return BeautifulSoup(answer.text, "html.parser").get_text(" ", strip=True)


def text(visitor: Visitor, page: str) -> str:
    """What a page says."""
    return BeautifulSoup(visitor.fetch(f"{visitor.url}{page}").text, "html.parser").get_text(" ", strip=True)


def maintenance(demo: DemoSite) -> list[str]:
    """Slurm's reservations for maintenance, a line each."""
    reported = demo.run("head", "scontrol", "--oneliner", "show", "reservation").stdout
    return [line for line in reported.splitlines() if "Flags=" in line and "MAINT" in line]


def test_a_maintenance_is_a_reservation_a_banner_and_a_page(demo: DemoSite) -> None:
    title = f"Cables {os.urandom(4).hex()}"
    begin = (datetime.now(UTC) + timedelta(hours=3)).replace(second=0, microsecond=0)
    end = begin + timedelta(hours=1)
    with demo.visitor("admin") as admin, demo.visitor("user1") as user:
        times = {
            f"{name}_{part}": f"{moment:{form}}"
            for name, moment in (("start", begin), ("end", end))
            for part, form in (("date", "%Y-%m-%d"), ("time", "%H:%M"))
        }
        try:
            send(admin, "maintenance/new/", "start_date", title=title, nodes="n2", text="Be ready.", **times)
            (line,) = maintenance(demo)
            assert " Nodes=n2 " in line and f"StartTime={begin:%Y-%m-%dT%H:%M:%S} " in line, line
            assert title in text(user, "jobs/"), "a banner on every page"
            assert "Be ready." in text(user, "maintenance/")
        finally:
            shown = admin.fetch(f"{admin.url}maintenance/")
            for form in BeautifulSoup(shown.text, "html.parser").select('form[action$="/cancel/"]'):
                admin.send(shown, form, {})
        wait_until("it is taken back", lambda: not maintenance(demo))
        assert title not in text(user, "jobs/")


def test_a_node_is_drained_with_a_reason_that_all_see(demo: DemoSite) -> None:
    def node(name: str) -> str:
        return demo.run("head", "scontrol", "--oneliner", "show", "node", name).stdout

    with demo.visitor("admin") as admin:

        def change(do: str, **values: str) -> None:
            shown = admin.fetch(f"{admin.url}admin/nodes/")
            form = BeautifulSoup(shown.text, "html.parser").select_one('form[action="/admin/nodes/n2/"]')
            assert form is not None
            admin.send(shown, form, {"do": do, **values})

        # The portal resumes it; where this run is killed, Slurm does.
        resume = "scontrol update NodeName=n2 State=RESUME || :"
        with demo.undoing(("head", "sh", "-c", resume)):
            change("drain", reason="a fan is broken")
            try:
                assert "DRAIN" in node("n2") and "Reason=a fan is broken (admin)" in node("n2")
                wait_until(
                    "the page shows it", lambda: "a fan is broken (admin)" in text(admin, "admin/nodes/")
                )
            finally:
                wait_until("it can be resumed", lambda: "Resume n2" in text(admin, "admin/nodes/"))
                change("resume")
        wait_until("it takes jobs again", lambda: "DRAIN" not in node("n2"))
        record = text(admin, "admin/record/?q=drained+the+node+n2")
        assert "drained the node n2: a fan is broken" in record and "admin" in record


def test_the_owner_of_a_session_that_an_administrator_stops_is_notified(demo: DemoSite) -> None:
    why = f"It filled the disk {os.urandom(4).hex()}."
    with demo.visitor("admin") as admin, demo.visitor("user1") as user:
        options = {
            "image": "base",
            "nodes": "1",
            "gpus_per_node": "0",
            "minutes": "10",
            "title": "To be stopped",
        }
        name = user.start(options)
        user.wait(name, "ready", timeout=HANG)
        job = demo.job_of(name)
        wait_until("the list shows it", lambda: f"Stop {job['id']}" in text(admin, "admin/jobs/"))
        send(admin, f"admin/jobs/{job['id']}/stop/", "message", message=why)
        assert "administrator" in user.wait(name, "ended", timeout=HANG).text
        send(admin, "admin/users/at/user1/", "message", do="message", message=f"Really. {why}")
        for sentence in (
            f"An administrator ended your job {job['id']}",
            why,
            f"Message from an administrator: Really. {why}",
        ):
            wait_until(
                f"the owner reads {sentence!r}", lambda sentence=sentence: sentence in text(user, "profile/")
            )


@pytest.fixture
def newcomers(demo: DemoSite) -> Iterator[list[str]]:
    """Unix accounts on every host that neither the portal nor Slurm knows."""
    first = 20_000 + int.from_bytes(os.urandom(2)) % 30_000
    names = [f"t{os.urandom(4).hex()}" for _ in range(2)]
    hosts = [machine.name for machine in demo.settings.machines()]
    for host in hosts:
        for number, name in enumerate(names):
            words = ["--no-create-home", "--user-group", "--uid", str(first + number), "--shell", "/bin/bash"]
            demo.run(host, "useradd", *words, name)
    yield names
    for name in names:
        demo.run("head", "scancel", f"--user={name}", check=False)
        wait_until("no job is left", lambda: not demo.run("head", "squeue", "--noheader").stdout.strip())
        demo.run("head", "sacctmgr", "--immediate", "delete", "user", name, check=False)
        demo.run("head", "rm", "-rf", f"/home/{name}")
        for host in hosts:
            demo.run(host, "userdel", name, check=False)
    with demo.visitor("admin") as admin:
        for name in names:
            if admin.fetch(f"{admin.url}admin/users/at/{name}/").status_code == 200:
                send(admin, f"admin/users/at/{name}/", "do", do="close")


def test_a_new_user_can_work_at_once_added_by_page_or_by_command(
    demo: DemoSite, newcomers: list[str], project: str
) -> None:
    with demo.visitor("admin") as admin:
        shown = admin.fetch(f"{admin.url}admin/users/new/")
        form = admin.form(shown, "name")
        chosen = next(option for option in form.select("option") if project in option.get_text())
        answer = admin.send(shown, form, {"name": newcomers[0], "project": str(chosen["value"])})
        password = BeautifulSoup(answer.text, "html.parser").select_one("main code")
        assert password is not None, answer.text
    words = ["onboard", newcomers[1], "--project", project, "--json"]
    reported = demo.run("head", "/opt/carme/venv/bin/carme-portal", *words).stdout
    secrets = [password.get_text(), json.loads(reported)["password"]]
    for name, secret in zip(newcomers, secrets, strict=True):
        with Visitor(demo.url, str(demo.certificate)) as visitor:
            visitor.login(name, secret)
            assert project in text(visitor, "projects/")
        assert demo.run("head", "stat", "-c", "%U %a", f"/home/{name}").stdout == f"{name} 700\n"
        for account in ([], [f"--account=carme-{project}"]):
            job = [
                "sbatch",
                "--parsable",
                "--time=2",
                "--mem=100",
                *account,
                "--wrap=true",
                "-o",
                "/dev/null",
            ]
            demo.run("head", *job, user=name)


def test_a_booking_for_a_project_is_its_members_alone(demo: DemoSite, project: str) -> None:
    def submit(*options: str) -> int:
        words = ["--parsable", "--time=2", "--mem=100", "--output=/dev/null", "--wrap=true", *options]
        return demo.run("head", "sbatch", *words, user="user2", check=False).returncode

    day = datetime.now(UTC) + timedelta(days=4)
    wanted = {"date": f"{day:%Y-%m-%d}", "time": "10:00", "nodes": "1", "length": "30m", "title": "Ours"}
    with demo.visitor("user1") as manager, demo.visitor("user2") as member:
        shown = manager.fetch(f"{manager.url}bookings/new/")
        answer = manager.send(shown, manager.form(shown, "length"), wanted | {"project": project})
        found = re.search(r"/bookings/(carme-[0-9a-f]{12})/$", str(answer.url))
        assert found, answer.text
        name = found[1]
        try:
            line = demo.run("head", "scontrol", "--oneliner", "show", "reservation", name).stdout
            assert f"Accounts=carme-{project} " in line and "Users=(null)" in line, line
            assert "Ours" in text(member, f"bookings/{name}/")
            own = [f"--reservation={name}", f"--account=carme-{project}"]
            assert submit(*own) == 0, "members may"
            assert submit(f"--reservation={name}") != 0, "not for what is not work of the project"
            demo.end_all_jobs()
            page = f"projects/at/{project}/"
            shown = manager.fetch(f"{manager.url}{page}")
            soup = BeautifulSoup(shown.text, "html.parser")
            form = soup.select_one(f'form[action="/{page}members/user2/"]')
            assert form is not None
            manager.send(shown, form, {"do": "remove"})
            assert submit(*own) != 0, "who is not a member any more may not"
            assert member.fetch(f"{member.url}bookings/{name}/").status_code == 404
        finally:
            shown = manager.fetch(f"{manager.url}bookings/{name}/delete/")
            form = BeautifulSoup(shown.text, "html.parser").select_one("main form")
            assert form is not None
            manager.send(shown, form, {})
        wait_until(
            "it is given back",
            lambda: name not in demo.run("head", "scontrol", "show", "reservation").stdout,
        )
