"""Files, presets, notices, projects and administration by the API: as on the pages, for tokens that may."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from auditlog.models import LogEntry
from django.conf import settings as django_settings
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from carme.errors import SlurmError
from carme_webui.accounts.models import User
from carme_webui.administration.models import AuditEntry
from carme_webui.announcements.models import Maintenance, News
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker as site_broker
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import notify
from carme_webui.projects import services
from carme_webui.projects.models import Invitation, Project
from carme_webui.sessions.actions import MOST_PRESETS
from carme_webui.sessions.models import Preset

from .conftest import Browser, Program, program_of
from .fake_broker import FakeBroker, make_job
from .test_api import problem
from .test_files import body

UPLOAD = "0123456789abcdef" * 2
OPTIONS = {"image": "torch", "minutes": 60}


@pytest.fixture
def home(broker: FakeBroker, settings: Any) -> Path:
    broker.home.mkdir()
    site = django_settings.SITE
    settings.SITE = site.model_copy(update={"sessions": site.sessions.model_copy(update={"bind": []})})
    return broker.home


@pytest.fixture
def root(admin: User) -> Program:
    """An administrator's program."""
    return program_of(admin)


@pytest.fixture
def vision(admin: User, alice: User, broker: FakeBroker) -> Project:
    """A project that alice manages."""
    return services.create(admin, "vision", "Computer vision", alice, site_broker())


def at(address: str, path: Path, **query: Any) -> str:
    values = "".join(f"&{name}={value}" for name, value in query.items())
    return f"{address}?path={quote(os.fsencode(path))}{values}"


def send(program: Program, path: Path, data: bytes, **query: Any) -> Any:
    values = {"id": UPLOAD, "offset": 0, "size": len(data)} | query
    return program.put(
        f"/api/v1/{at('files/upload', path, **values)}", data, content_type="application/octet-stream"
    )


# --- files -----------------------------------------------------------------------------------------------


def test_files_are_sent_in_parts_listed_renamed_fetched_and_deleted(program: Program, home: Path) -> None:
    path = home / "new & old.bin"
    response = program.ask("post", at("files/folders", home), {"name": "data"})
    assert (response.status_code, response.json()["path"]) == (201, f"{home}/data")
    assert send(program, path, b"abc", size=5).json() == {"offset": 3, "done": False, "exists": False}
    assert program.ask("get", at("files/upload", path, id=UPLOAD)).json()["offset"] == 3
    assert "3 bytes have arrived" in problem(send(program, path, b"e", size=5, offset=4), 409)["detail"]
    assert send(program, path, b"de", size=5, offset=3).json()["done"]
    assert "already" in problem(send(program, path, b"x"), 409)["detail"]
    listing = program.ask("get", "files").json()
    assert [(entry["name"], entry["kind"]) for entry in listing["entries"]] == [
        ("data", "folder"),
        (path.name, "file"),
    ]
    assert (listing["entries"][1]["key"], listing["entries"][1]["size"]) == (quote(str(path)), 5)
    whole = program.ask("get", at("files/content", path))
    assert (whole.status_code, body(whole)) == (200, b"abcde")
    part = program.get(f"/api/v1/{at('files/content', path)}", headers={"range": "bytes=3-"})
    assert (part.status_code, body(part), part["Content-Range"]) == (206, b"de", "bytes 3-4/5")
    beyond = program.get(f"/api/v1/{at('files/content', path)}", headers={"range": "bytes=9-"})
    assert problem(beyond, 416) and beyond["Content-Range"] == "bytes */5"
    renamed = program.ask("patch", at("files", path), {"name": "kept"})
    assert renamed.json()["path"] == f"{home}/kept" and (home / "kept").exists()
    assert program.ask("delete", at("files", home / "data")).status_code == 204
    assert [file.name for file in home.iterdir()] == ["kept"]
    assert program.ask("get", "files/places").json() == [{"name": "Home", "path": str(home)}]
    assert program.ask("get", "files/room").json()[0]["free"] > 0


def test_a_name_that_is_no_text_can_be_fetched(program: Program, home: Path) -> None:
    (home / os.fsdecode(b"caf\xe9")).write_text("latin")
    entry = program.ask("get", "files").json()["entries"][0]
    assert entry["name"] == "caf\N{REPLACEMENT CHARACTER}"
    assert body(program.get(f"/api/v1/files/content?path={entry['key']}")) == b"latin"


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/", "~", "home", "{home}/../../etc/passwd", "{home}/%00", "{home}x", "//etc/passwd"],
)
def test_no_path_leads_out_of_my_folders(program: Program, home: Path, path: str) -> None:
    where = path.format(home=home)
    for method, address, sent in (
        ("get", "files", None), ("get", "files/content", None), ("delete", "files", None),
        ("patch", "files", {"name": "x"}), ("post", "files/folders", {"name": "x"}),
    ):  # fmt: skip
        message = problem(program.ask(method, f"{address}?path={where}", sent), 422)
        assert "does not show this folder" in message["detail"] and message["field"] == "path"
    problem(program.put(f"/api/v1/files/upload?path={where}&id={UPLOAD}&offset=0&size=1", b"x"), 422)


@pytest.mark.parametrize("name", ["..", "a/b", "", "a\nb", "/etc/x"])
def test_a_new_name_is_one_name(program: Program, home: Path, name: str) -> None:
    (home / "x").write_text("")
    assert problem(program.ask("patch", at("files", home / "x"), {"name": name}), 422)["field"] == "name"
    problem(program.ask("post", at("files/folders", home), {"name": name}), 422)
    assert [file.name for file in home.iterdir()] == ["x"]


def test_what_is_missing_or_closed_is_reported(program: Program, home: Path) -> None:
    assert "no 'x'" in problem(program.ask("get", at("files/content", home / "x")), 404)["detail"]
    assert "cannot be deleted" in problem(program.ask("delete", at("files", home)), 422)["detail"]
    problem(send(program, home / "x", b"abc", size=10**17), 422)
    assert problem(send(program, home / "x", b"abc", id="../x"), 422)["field"] == "id"


def test_reading_files_and_changing_them_are_two_scopes(alice: User, home: Path) -> None:
    (home / "x").write_text("mine")
    for scope, allowed, refused in (("files-read", "get", "delete"), ("files", "delete", "get")):
        (home / "x").write_text("mine")
        found = program_of(alice, scope)
        problem(found.ask(refused, at("files" if refused == "delete" else "files/content", home / "x")), 403)
        address = at("files" if allowed == "delete" else "files/content", home / "x")
        assert found.ask(allowed, address).status_code in (200, 204)
    for scope in ("jobs", "sessions", "admin"):
        problem(program_of(alice, scope).ask("get", "files"), 403)


# --- presets and notices ---------------------------------------------------------------------------------


def test_presets_are_those_of_the_page(program: Program, browser: Browser, broker: FakeBroker) -> None:
    response = program.ask("post", "presets", {"name": "mine", "options": OPTIONS | {"gpus_per_node": 1}})
    assert response.status_code == 201 and "gpus_per_node=1" in response.json()["link"]
    assert "mine" in browser.get("/").content.decode()
    again = program.ask("post", "presets", {"name": "mine", "options": OPTIONS})
    assert (
        again.json()["number"] == response.json()["number"]
        and Preset.objects.get().options["gpus_per_node"] == 0
    )
    assert [entry["name"] for entry in program.ask("get", "presets").json()] == ["mine"]
    wrong = program.ask("post", "presets", {"name": "x", "options": OPTIONS | {"nodes": 9}})
    assert problem(wrong, 422)["field"] == "nodes"
    assert program.ask("delete", f"presets/{response.json()['number']}").status_code == 204
    problem(program.ask("delete", f"presets/{response.json()['number']}"), 404)


def test_presets_have_a_number_and_are_their_owners(program: Program, bob: User, broker: FakeBroker) -> None:
    his = Preset.objects.create(owner=bob, name="his", options=OPTIONS)
    problem(program.ask("delete", f"presets/{his.pk}"), 404)
    assert program.ask("get", "presets").json() == [] and Preset.objects.count() == 1
    for number in range(MOST_PRESETS):
        assert program.ask("post", "presets", {"name": str(number), "options": OPTIONS}).status_code == 201
    assert (
        "already" in problem(program.ask("post", "presets", {"name": "x", "options": OPTIONS}), 422)["detail"]
    )


def test_notices_are_read_and_chosen(program: Program, alice: User, bob: User) -> None:
    notify(alice, "first", link="/jobs/7/")
    notify(alice, "second")
    notify(bob, "not hers")
    reported = program.ask("get", "notices", unread="true").json()["items"]
    assert [notice["text"] for notice in reported] == ["second", "first"]
    assert reported[1]["link"] == "https://carme.example:8443/jobs/7/"
    assert program.ask("post", "notices/read").status_code == 204
    assert program.ask("get", "notices", unread="true").json()["items"] == []
    assert len(program.ask("get", "notices").json()["items"]) == 2
    assert Notice.objects.get(user=bob).read is None
    kinds = {entry["kind"]: entry for entry in program.ask("get", "notices/kinds").json()}
    assert "approval" not in kinds and kinds["job-over"]["page"] is False
    chosen = program.ask("put", "notices/kinds/job-over", {"page": True, "mail": False}).json()
    assert (chosen["page"], chosen["mail"]) == (True, False)
    fixed = program.ask("put", "notices/kinds/account", {"page": False, "mail": False}).json()
    assert (fixed["page"], fixed["mail"]) == (True, False)
    alice.refresh_from_db()
    assert alice.wanted == {"job-over": [True, False], "account": [True, False]}
    problem(program.ask("put", "notices/kinds/approval", {"page": True, "mail": True}), 404)
    problem(program.ask("put", "notices/kinds/nonsense", {"page": True, "mail": True}), 422)


# --- projects --------------------------------------------------------------------------------------------


def test_a_project_from_its_making_to_its_end(
    root: Program, program: Program, bob: User, broker: FakeBroker
) -> None:
    response = root.ask(
        "post", "projects", {"name": "vision", "title": "Computer  vision", "manager": "alice"}
    )
    assert response.status_code == 201 and response.json()["managers"] == ["alice"]
    limits = root.ask(
        "patch", "projects/vision", {"gpus": 2, "partitions": ["gpu"], "gpu_types": {"a100": 1}}
    )
    assert limits.json()["gpus"] == 2 and broker.granted["carme-vision"].resources["gres/gpu"] == 2
    assert root.ask("patch", "projects/vision", {"nodes": 3}).json()["gpus"] == 2
    assert root.ask("patch", "projects/vision", {"gpus": None}).json()["gpus"] is None
    invited = program.ask("post", "projects/vision/invitations", {"user": "bob"})
    assert (invited.status_code, invited.json()["invited"]) == (201, ["bob"])
    his = program_of(bob)
    (requested,) = his.ask("get", "invitations").json()
    assert (requested["project"], requested["by"]) == ("vision", "alice")
    assert his.ask("post", f"invitations/{requested['number']}", {"accept": True}).status_code == 200
    assert his.ask("get", "projects/vision").json()["members"] == ["alice", "bob"]
    assert set(broker.granted["carme-vision"].members) == {"alice", "bob"}
    role = program.ask("patch", "projects/vision/members/bob", {"manager": True})
    assert role.json()["managers"] == ["alice", "bob"]
    assert his.ask("delete", "projects/vision/members/bob").status_code == 204
    problem(his.ask("get", "projects/vision"), 404)
    assert "only manager" in problem(program.ask("delete", "projects/vision/members/alice"), 422)["detail"]
    closed = root.ask("put", "projects/vision/state", {"closed": True}).json()
    assert closed["closed"] and broker.granted["carme-vision"].members == {}
    assert root.ask("put", "projects/vision/state", {"closed": False}).json()["closed"] is None


def test_nobody_else_touches_a_project(vision: Project, alice: User, bob: User, broker: FakeBroker) -> None:
    stranger = program_of(bob)
    for method, path, sent in (
        ("get", "projects/vision", None),
        ("post", "projects/vision/invitations", {"user": "bob"}),
        ("delete", "projects/vision/members/alice", None),
        ("patch", "projects/vision/members/alice", {"manager": False}),
        ("patch", "projects/vision", {"gpus": 99}),
        ("put", "projects/vision/state", {"closed": True}),
        ("post", "projects", {"name": "own", "title": "Own", "manager": "bob"}),
    ):
        problem(stranger.ask(method, path, sent), 404)
    member = program_of(User.objects.create_user("eve"))
    vision.memberships.create(user=User.objects.get(username="eve"))
    problem(member.ask("post", "projects/vision/invitations", {"user": "bob"}), 403)
    problem(member.ask("delete", "projects/vision/members/alice"), 403)
    problem(member.ask("patch", "projects/vision", {"gpus": 99}), 404)
    invitation = services.invite(alice, vision, "bob")
    problem(member.ask("post", f"invitations/{invitation.pk}", {"accept": True}), 404)
    vision.refresh_from_db()
    assert vision.gpus is None and vision.closed is None and Invitation.objects.count() == 1


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"partitions": ["nowhere"]}, "partitions"), ({"gpu_types": {"h1": 1}}, "gpu_types"),
        ({"gpus": -1}, "gpus"),
        ({"minutes": 0}, "minutes"), ({"title": "a\u202eb"}, "title"), ({"owner": "me"}, "owner"),
    ],
)  # fmt: skip
def test_a_wrong_limit_names_its_field(
    root: Program, vision: Project, sent: dict[str, Any], field: str
) -> None:
    assert problem(root.ask("patch", "projects/vision", sent), 422)["field"] == field


# --- administration --------------------------------------------------------------------------------------

ADMINS_ALONE = [
    ("get", "admin/users", None), ("post", "admin/users", {"name": "eve"}), ("get", "admin/users/bob", None),
    ("patch", "admin/users/bob", {"active": False}), ("post", "admin/users/bob/messages", {"message": "x"}),
    ("delete", "admin/users/bob/second-factor", None), ("get", "admin/nodes", None),
    ("put", "admin/nodes/n1/drain", {"reason": "x"}), ("delete", "admin/nodes/n1/drain", None),
    ("get", "admin/jobs", None), ("post", "admin/jobs/7/stop", {}), ("get", "admin/approvals", None),
    ("get", "admin/record", None), ("get", "admin/policies", None), ("post", "news", {"title": "x"}),
    ("put", "news/1", {"title": "x"}), ("delete", "news/1", None),
    ("post", "maintenance", {"title": "x", "start": "2099-01-01T00:00:00Z", "end": "2099-01-02T00:00:00Z"}),
    ("patch", "maintenance/carme-maintenance-0", {}), ("delete", "maintenance/carme-maintenance-0", None),
    ("post", "bookings/carme-0123456789ab/decision", {"approve": True}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "sent"), ADMINS_ALONE)
def test_administration_is_for_administrators_with_a_token_for_it(
    program: Program, admin: User, bob: User, broker: FakeBroker, method: str, path: str, sent: Any
) -> None:
    broker.put(make_job(7, user="bob"))
    problem(program.ask(method, path, sent), 404)
    plain = program_of(admin, "jobs", "sessions", "bookings", "projects", "profile", "files", "files-read")
    assert "'admin'" in problem(plain.ask(method, path, sent), 403)["detail"]
    problem(Program("").ask(method, path, sent), 401)
    assert not [request for request in broker.requests if request.method not in ("cluster", "jobs")]
    assert User.objects.get(username="bob").is_active and not AuditEntry.objects.exists()


def test_only_administrators_are_offered_the_scope(browser: Browser, alice: User) -> None:
    assert 'value="admin"' not in browser.get("/tokens/").content.decode()
    assert browser.send("/tokens/", "/tokens/", label="x", days="3", scopes=["admin"]).status_code == 422
    User.objects.filter(pk=alice.pk).update(is_staff=True)
    assert 'value="admin"' in browser.get("/tokens/").content.decode()


def test_users_are_added_notified_and_disabled(
    root: Program, admin: User, bob: User, vision: Project, broker: FakeBroker
) -> None:
    response = root.ask(
        "post", "admin/users", {"name": "eve", "email": "eve@example.org", "project": "vision"}
    )
    assert response.status_code == 201 and len(response.json()["password"]) >= 12
    assert response.json()["user"]["projects"] == ["vision"] and response.json()["done"]
    assert response.json()["password"] not in str(list(LogEntry.objects.values()))
    assert root.ask("post", "admin/users", {"name": "eve"}).json()["password"] == ""
    assert problem(root.ask("post", "admin/users", {"name": "Eve!"}), 422)["field"] == "name"
    assert (
        problem(root.ask("post", "admin/users", {"name": "z", "project": "none"}), 422)["field"] == "project"
    )
    assert [entry["name"] for entry in root.ask("get", "admin/users", q="ev").json()["items"]] == ["eve"]
    token = program_of(bob)
    assert root.ask("patch", "admin/users/bob", {"active": False}).json()["active"] is False
    problem(token.ask("get", "profile"), 401)
    assert root.ask("patch", "admin/users/bob", {"active": True}).json()["active"]
    problem(root.ask("patch", "admin/users/root1", {"active": False}), 403)
    assert root.ask("post", "admin/users/bob/messages", {"message": "Call  me"}).status_code == 204
    assert Notice.objects.get(user=bob).text.endswith("Call me")
    assert root.ask("delete", "admin/users/bob/second-factor").status_code == 204


def test_nodes_are_drained_with_a_reason(root: Program, broker: FakeBroker) -> None:
    assert [entry["name"] for entry in root.ask("get", "admin/nodes").json()] == ["n1", "n2", "n3"]
    assert root.ask("put", "admin/nodes/n1/drain", {"reason": "fan  broken"}).status_code == 204
    assert root.ask("delete", "admin/nodes/n1/drain").status_code == 204
    drained, resumed = broker.requests_of("node")
    assert (drained.drain, drained.reason, resumed.drain) == (True, "fan broken (root1)", False)
    assert [row.text for row in AuditEntry.objects.all()] == [
        "drained the node n1: fan broken",
        "resumed the node n1",
    ]
    problem(root.ask("put", "admin/nodes/n1/drain", {"reason": ""}), 422)
    broker.refusal = SlurmError("Slurm refused: no.", "Wait.")
    problem(root.ask("put", "admin/nodes/n1/drain", {"reason": "x"}), 409)


def test_any_job_is_stopped_and_its_owner_notified(root: Program, bob: User, broker: FakeBroker) -> None:
    for number in range(1, 6):
        broker.put(make_job(number, user="bob" if number % 2 else "eve", state="RUNNING"))
    first = root.ask("get", "admin/jobs", limit=2).json()
    assert [entry["id"] for entry in first["items"]] == [5, 4] and first["items"][0]["user"] == "bob"
    rest = root.ask("get", "admin/jobs", cursor=first["next"]).json()
    assert [entry["id"] for entry in rest["items"]] == [3, 2, 1] and rest["next"] is None
    assert [entry["id"] for entry in root.ask("get", "admin/jobs", q="eve").json()["items"]] == [4, 2]
    stopped = root.ask("post", "admin/jobs/3/stop", {"message": "It filled  the disk."})
    assert (stopped.status_code, stopped.json()["user"]) == (200, "bob")
    assert Notice.objects.get(user=bob).text.endswith("It filled the disk.")
    assert "It filled the disk." in AuditEntry.objects.get().text
    problem(root.ask("post", "admin/jobs/99/stop", {}), 404)


def test_the_record_is_searched(root: Program, admin: User, vision: Project) -> None:
    root.ask("patch", "projects/vision", {"gpus": 7})
    (change,) = root.ask("get", "admin/record", q='"gpus"').json()["items"]
    assert (change["who"], change["what"], change["changes"]["gpus"]) == ("root1", "vision", ["None", "7"])
    tomorrow = (timezone.now() + timedelta(days=1)).date()
    assert root.ask("get", "admin/record", since=tomorrow).json()["items"] == []
    assert root.ask("get", "admin/record", who="nobody").json()["items"] == []
    of_projects = root.ask("get", "admin/record", kind="project").json()["items"]
    assert change in of_projects and {project["kind"] for project in of_projects} == {"project"}
    assert root.ask("get", "admin/record", kind="own image").json()["items"] == []
    User.objects.filter(pk=admin.pk).update(language="de")
    in_german = root.ask("get", "admin/record", kind="user").json()["items"]
    assert in_german and {change["kind"] for change in in_german} == {"user"}
    User.objects.filter(pk=admin.pk).update(language="")
    unknown = problem(root.ask("get", "admin/record", kind="Benutzer"), 422)
    assert unknown["field"] == "kind" and "own image, project and user" in unknown["detail"]
    part = root.ask("get", "admin/record", limit=1).json()
    assert len(part["items"]) == 1 and part["next"]
    problem(root.ask("get", "admin/record", since="someday"), 422)


def test_bookings_are_approved_where_they_wait(
    root: Program, program: Program, alice: User, rules: Any, broker: FakeBroker
) -> None:
    rules(approval_gpu_hours=1)
    start = (timezone.now() + timedelta(hours=2)).replace(microsecond=0).isoformat()
    proposed = {"partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "minutes": 60, "start": start}
    name = program.ask("post", "bookings", proposed).json()["name"]
    (waiting,) = root.ask("get", "admin/approvals").json()["items"]
    assert (waiting["name"], waiting["owner"]) == (name, "alice")
    answer = {"approve": True, "reason": "Good  luck."}
    assert root.ask("post", f"bookings/{name}/decision", answer).json()["state"] == "approved"
    assert "Good luck." in Notice.objects.filter(user=alice, kind="booking-decided").get().text
    assert root.ask("get", "admin/approvals").json()["items"] == [] and Booking.objects.get().reserved


def test_news_and_maintenance_are_written_changed_and_taken_back(
    root: Program, program: Program, broker: FakeBroker
) -> None:
    created = root.ask(
        "post", "news", {"title": "New  nodes", "text": "Two\nlines", "until": "2099-01-01"}
    ).json()
    assert program.ask("get", "news").json()[0]["title"] == "New nodes"
    assert root.ask("put", f"news/{created['number']}", {"title": "More"}).json()["until"] is None
    assert len(program.ask("get", "news/all").json()["items"]) == 1
    assert root.ask("delete", f"news/{created['number']}").status_code == 204 and not News.objects.exists()
    start = timezone.now() + timedelta(days=1)
    times = {"start": start.isoformat(), "end": (start + timedelta(hours=2)).isoformat()}
    plan = root.ask("post", "maintenance", {"title": "Cooling", "nodes": ["n1"], **times})
    assert plan.status_code == 201 and plan.json()["reserved"] and plan.json()["name"] in broker.reservations
    name = plan.json()["name"]
    changed = root.ask("patch", f"maintenance/{name}", {"nodes": [], "title": "All"}).json()
    assert (changed["title"], changed["node_names"]) == ("All", ["n1", "n2", "n3"])
    assert [entry["name"] for entry in program.ask("get", "maintenance").json()] == [name]
    wrong = root.ask("patch", f"maintenance/{name}", {"end": times["start"]})
    assert "must end after" in problem(wrong, 422)["detail"]
    strange = root.ask("post", "maintenance", {"title": "x", "nodes": ["n9"], **times})
    assert problem(strange, 422)["field"] == "nodes" and Maintenance.objects.count() == 1
    assert root.ask("delete", f"maintenance/{name}").status_code == 204 and name not in broker.reservations


def test_the_start_of_maintenance_that_has_begun_stays(root: Program, broker: FakeBroker) -> None:
    now = timezone.now().replace(microsecond=0)
    row = Maintenance.objects.create(
        title="Now", start=now - timedelta(hours=1), end=now + timedelta(hours=1), node_names=["n1"]
    )
    later = (now + timedelta(minutes=5)).isoformat()
    assert problem(root.ask("patch", f"maintenance/{row.name}", {"start": later}), 422)["field"] == "start"
    assert root.ask("patch", f"maintenance/{row.name}", {"end": later}).status_code == 200


def test_policies_are_reported(root: Program) -> None:
    reported = {part["title"]: part["values"] for part in root.ask("get", "admin/policies").json()}
    assert reported["Sessions"]["maximum_minutes"] == 600


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize(
    "path",
    [
        "admin/users",
        "admin/record",
        "admin/jobs",
        "admin/approvals",
        "news/all",
        "maintenance",
        "projects",
        "notices",
    ],
)
def test_questions_to_the_database_do_not_grow_with_rows(
    root: Program, admin: User, broker: FakeBroker, path: str
) -> None:
    def add(number: int) -> None:
        user = User.objects.create_user(f"user{number}")
        project = Project.objects.create(name=f"project{number}", title="x")
        for member in (user, admin):
            project.memberships.create(user=member)
        project.invitations.create(user=User.objects.create_user(f"guest{number}"))
        times = {"start": timezone.now() + timedelta(hours=1), "end": timezone.now() + timedelta(hours=2)}
        Booking.objects.create(
            name=f"carme-{number:012}", owner=user, project=project, title="x", partition="gpu",
            gpu_type="a100", gpus_per_node=4, node_names=["n1"], state="requested", **times,
        )  # fmt: skip
        Maintenance.objects.create(title="x", node_names=["n1"], **times)
        News.objects.create(title="x")
        notify(admin, "x")
        broker.put(make_job(number, user=user.username))

    def requested() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert root.ask("get", path).status_code == 200
        return len(queries)

    add(1)
    requested()  # notes that the token was used
    before = requested()
    for number in range(2, 8):
        add(number)
    assert requested() == before
