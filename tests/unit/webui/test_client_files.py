"""`carme.Client` and commands for files, presets, notices, projects and administration."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

import carme
from carme import api
from carme.cli import main
from carme.errors import InvalidRequest, NotFound
from carme_webui.accounts.models import User
from carme_webui.api.models import SCOPES, Token
from carme_webui.profile.notices import notify

from .client_steps import client, elsewhere, home, token

__all__ = ["client", "elsewhere", "home", "token"]

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_file_goes_there_and_back(client: carme.Client, home: Path, tmp_path: Path) -> None:
    here = tmp_path / "data & more.bin"
    here.write_bytes(bytes(range(256)) * 50_000)  # more than one part
    seen: list[tuple[int, int]] = []
    path = client.files.upload(here, f"{home}/", progress=lambda done, size: seen.append((done, size)))
    assert Path(path).read_bytes() == here.read_bytes() and [done for done, _size in seen] == [
        8 << 20,
        12_800_000,
    ]
    with pytest.raises(InvalidRequest, match="already"):
        client.files.upload(here, path)
    assert client.files.upload(here, path, replace=True) == path
    with pytest.raises(InvalidRequest, match="already exists here"):
        client.files.download(path, here)
    got = client.files.download(path, tmp_path / "back.bin")
    assert got.read_bytes() == here.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["back.bin", here.name]
    (entry,) = client.files.list().entries
    assert (entry.name, entry.size) == (here.name, 12_800_000)
    folder = client.files.make_folder(f"{home}/new")
    assert client.files.rename(folder, "newer") == f"{home}/newer"
    client.files.delete(f"{home}/newer")
    assert [file.name for file in home.iterdir()] == [here.name] and client.files.places()[0].path == str(
        home
    )
    assert client.files.quotas()[0].free > 0
    with pytest.warns(DeprecationWarning, match=r"files\.quotas"):
        assert client.files.room()[0].path == client.files.quotas()[0].path
    with pytest.warns(DeprecationWarning, match="QuotaOut"):
        assert getattr(api, "RoomOut") is api.QuotaOut  # noqa: B009 - no type checker knows it


def test_an_empty_file_goes_there_and_back(client: carme.Client, home: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    path = client.files.upload(tmp_path / "empty", f"{home}/")
    assert client.files.download(path, tmp_path / "back").read_bytes() == b""


def test_an_interrupted_upload_goes_on_where_it_was(
    client: carme.Client, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "data"
    here.write_bytes(b"0123456789")
    monkeypatch.setattr("carme.client.files.PART", 4)

    def interrupt(done: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.files.upload(here, f"{home}/data", progress=interrupt)
    assert not (home / "data").exists()
    seen: list[int] = []
    client.files.upload(here, f"{home}/data", progress=lambda done, size: seen.append(done))
    assert seen == [8, 10] and (home / "data").read_bytes() == b"0123456789"


def test_an_interrupted_download_goes_on_unless_the_file_has_changed(
    client: carme.Client, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "data").write_bytes(b"0123456789")
    monkeypatch.setattr("carme.client.files.CHUNK", 4)

    def interrupt(done: int, size: int) -> None:
        raise KeyboardInterrupt

    def begin() -> None:
        with pytest.raises(KeyboardInterrupt):
            client.files.download(f"{home}/data", tmp_path / "back", progress=interrupt)
        assert not (tmp_path / "back").exists()

    begin()
    seen: list[int] = []
    client.files.download(f"{home}/data", tmp_path / "back", progress=lambda done, size: seen.append(done))
    assert seen == [7, 10] and (tmp_path / "back").read_bytes() == b"0123456789"
    (tmp_path / "back").unlink()
    begin()
    (home / "data").write_bytes(b"abcdefghijkl")
    client.files.download(f"{home}/data", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"abcdefghijkl"


def test_what_cannot_be_read_or_found_is_reported(client: carme.Client, home: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        client.files.upload(tmp_path / "nothing", f"{home}/x")
    with pytest.raises(NotFound, match="no 'x'"):
        client.files.download(f"{home}/x", tmp_path / "x")
    with pytest.raises(InvalidRequest, match="does not show this folder"):
        client.files.list("/etc")


@pytest.mark.usefixtures("broker")
def test_presets_and_notices_are_managed(client: carme.Client, resume_sync: Any) -> None:
    notify(User.objects.get(username="alice"), "hello")
    client.presets.save("small", image="torch", minutes=30)
    assert [preset.name for preset in client.presets.list()] == ["small"]
    session = client.presets.start("small")
    assert session.info().options.minutes == 30
    client.presets.delete("small")
    with pytest.raises(NotFound, match="no preset 'small'"):
        client.presets.start("small")
    assert [notice.text for notice in client.notices.list(unread=True)] == ["hello"]
    client.notices.read()
    assert client.notices.list(unread=True) == []
    assert client.notices.choose("job-over", page=True, mail=True).mail
    assert {kind.kind for kind in client.notices.kinds()} >= {"job-over", "project"}


@pytest.mark.usefixtures("broker")
def test_projects_and_users_are_managed(client: carme.Client, live_server: Any) -> None:
    with pytest.raises(NotFound):
        client.admin.users()
    root = User.objects.create_user("root1", is_staff=True)
    User.objects.create_user("bob")
    secret = Token.make(root, "t", list(SCOPES), timezone.now() + timedelta(days=1))[1]
    with carme.Client(live_server.url, secret) as boss:
        assert boss.projects.create("vision", "Vision", "alice").managers == ["alice"]
        assert boss.projects.limit("vision", gpus=2, gpu_types={"a100": 1}).gpus == 2
        assert [user.name for user in boss.admin.users("bo")] == ["bob"]
        assert boss.admin.onboard("eve", project="vision").user.projects == ["vision"]
        with pytest.warns(DeprecationWarning, match=r"admin\.onboard"):
            assert boss.admin.take_in("eve").user.projects == ["vision"]
        assert not boss.admin.set_active("eve", False).active
        boss.admin.drain("n1", "fan")
        boss.admin.resume("n1")
        assert [node.name for node in boss.admin.nodes()] == ["n1", "n2", "n3"]
        assert boss.admin.record("gpus", who="root1", limit=1)[0].what == "vision"
        assert boss.admin.policies() and boss.admin.approvals() == [] and boss.admin.jobs() == []
        number = boss.admin.publish("Hello").number
        assert [announcement.title for announcement in boss.admin.news()] == ["Hello"]
        boss.admin.delete_news(number)
        start = datetime.now(UTC) + timedelta(days=1)
        plan = boss.admin.plan_maintenance(
            "Cooling", start=start, end=start + timedelta(hours=1), nodes=["n1"]
        )
        assert boss.admin.change_maintenance(plan.name, nodes=["n2"]).node_names == ["n2"]
        boss.admin.cancel_maintenance(plan.name)
        assert boss.admin.maintenance() == []
        # By their earlier names.
        hello = boss.admin.publish("Hello")
        plan = boss.admin.plan_maintenance("Fans", start=start, end=start + timedelta(hours=1))
        with pytest.warns(DeprecationWarning, match=r"admin\.delete_news"):
            boss.admin.take_away(hello.number)
        with pytest.warns(DeprecationWarning, match=r"admin\.cancel_maintenance"):
            boss.admin.call_off(plan.name)
        assert boss.admin.news() == [] and boss.admin.maintenance() == []
        with pytest.warns(DeprecationWarning, match=r"admin\.remove_second_factor"):
            boss.admin.take_second_factor("eve")
    assert client.projects.invite("vision", "bob").invited == ["bob"]
    assert client.projects.withdraw("vision", "bob").invited == []
    assert [project.name for project in client.projects()] == [
        "vision"
    ] and client.projects.invitations() == []
    with pytest.raises(NotFound):
        client.projects.limit("vision", gpus=99)


@pytest.mark.usefixtures("broker")
def test_commands_manage_files_projects_and_users(
    live_server: Any, token: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CARME_URL", live_server.url)
    monkeypatch.setenv("CARME_TOKEN", token)
    (tmp_path / "here").write_text("hello")

    def seen(*words: str) -> Any:
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    assert seen("files", "upload", str(tmp_path / "here"), f"{home}/") == {"path": f"{home}/here"}
    assert seen("files", "list")["entries"][0]["name"] == "here"
    assert main(["files", "list"]) == 0 and "here" in capsys.readouterr().out
    there = str(tmp_path / "there")
    assert seen("files", "download", f"{home}/here", there) == {"file": there}
    assert seen("presets", "save", "small", "--image", "torch", "--time", "30")["options"]["minutes"] == 30
    assert seen("notices", "choose", "job-over", "--page", "yes", "--mail", "no")["page"]
    assert seen("projects", "list") == [] and seen("projects", "invitations") == []
    assert main(["projects", "accept", "vision"]) == 1 and "You have no invitation" in capsys.readouterr().err
    assert main(["admin", "users"]) == 1
    User.objects.filter(username="alice").update(is_staff=True)
    assert seen("admin", "users")[0]["name"] == "alice"
    assert seen("projects", "create", "vision", "--title", "Vision", "--manager", "alice")["name"] == "vision"
    assert seen("projects", "limit", "vision", "--gpus", "3", "--time", "2h")["minutes"] == 120
    assert seen("projects", "limit", "vision", "--gpus", "none")["gpus"] is None
    assert main(["projects", "show", "vision"]) == 0 and "carme-vision" in capsys.readouterr().out
    assert seen("admin", "record", "gpus", "--since", "2026-01-01")[0]["who"] == "alice"
    assert seen("admin", "record", "gpus", "--kind", "project")[0]["kind"] == "project"
    assert seen("admin", "record", "gpus", "--kind", "booking") == []
    start = datetime.now(UTC) + timedelta(days=1)
    times = ["--start", start.isoformat(), "--end", (start + timedelta(hours=1)).isoformat()]
    plans = [seen("admin", "plan", "--title", title, *times)["name"] for title in ("Fans", "Pumps")]
    assert seen("admin", "cancel-maintenance", plans[0]) == {"cancelled": plans[0]}
    # By its earlier name.
    assert main(["admin", "call-off", plans[1], "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"cancelled": plans[1], "called_off": plans[1]}
    assert "'call-off' is 'cancel-maintenance' now" in shown.err
    assert seen("admin", "maintenance") == []
    for words in (["nodes"], ["jobs"], ["approvals"], ["record"], ["policies"], ["maintenance"], ["news"]):
        assert main(["admin", *words]) == 0 and capsys.readouterr().out
    assert main(["admin", "record", "--since", "someday"]) == 1 and "is not a day" in capsys.readouterr().err
    assert main(["admin", "disable", "alice"]) == 1
