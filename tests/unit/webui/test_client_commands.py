"""The commands that work from a computer that is not the cluster's."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import carme
from carme.cli import main
from carme.client import Login
from carme.client.connection import Connection, Unreachable
from carme.errors import ConfigError, Denied, InvalidRequest
from carme.jobs import JobState
from carme_webui.jobs.models import Job
from patience import HANG

from .client_steps import client, elsewhere, run, token
from .fake_broker import NOW, FakeBroker, make_job

__all__ = ["client", "elsewhere", "run", "token"]

pytestmark = pytest.mark.django_db(transaction=True)


def test_commands_work_from_another_computer(
    elsewhere: Any, broker: FakeBroker, run: Any, tmp_path: Path, capsys: Any
) -> None:
    script = tmp_path / "hello.sh"
    script.write_text("echo hello\n")
    capsys.readouterr()
    assert main(["submit", "--json", str(script)]) == 0
    number = json.loads(capsys.readouterr().out)["job_id"]
    Job.store([broker.queue[number]])
    assert [job["id"] for job in elsewhere("jobs")] == [number]
    run(number)
    assert elsewhere("jobs") == [] and [job["id"] for job in elsewhere("jobs", "--history")] == [number]
    assert elsewhere("logs", str(number))["text"] == "hello\n"
    assert elsewhere("status")["nodes"] and main(["status"]) == 0
    assert "PARTITION" in capsys.readouterr().out
    assert elsewhere("bookings", "list") == []
    for group in ("session", "sessions"):
        assert elsewhere(group, "list") == []
        for action in ("stop", "show", "open"):
            assert main([group, action, "snothing1"]) == 1
            assert "not yours" in capsys.readouterr().err


def test_jobs_are_extended_and_sessions_sized_from_another_computer(
    elsewhere: Any,
    client: carme.Client,
    broker: FakeBroker,
    hub: Any,
    at_once: None,
    capsys: Any,
    live_server: Any,
) -> None:
    job, tasks = client.submit(["sleep", "60"]), client.array(["sleep", "60"], "0-1")
    runs = {"state": JobState.RUNNING, "started": NOW, "node_list": "n1", "minutes_limit": 60}
    Job.store([broker.put(broker.queue[job.id].model_copy(update=runs))])
    broker.put(make_job(99, kind="batch", array_id=tasks.id, task=1, started=NOW))
    assert job.extend(30).minutes_limit == 90
    assert tasks[1].extend(45).minutes_limit == 105
    assert elsewhere("extend", str(job.id), "1h")["minutes_limit"] == 150
    requested = [(request.job_id, request.minutes, request.user) for request in broker.requests_of("extend")]
    assert requested == [(job.id, 30, "alice"), (99, 45, "alice"), (job.id, 60, "alice")]
    sizes = ["--cpus", "3", "--memory", "5000"]
    started = elsewhere("session", "start", "--image", "torch", "--time", "30", *sizes)
    options = started["options"]
    assert (options["cpus_per_node"], options["memory_mb_per_node"]) == (3, 5000)
    assert elsewhere("session", "show", started["name"]) == elsewhere("sessions", "list")[0]
    capsys.readouterr()
    assert main(["session", "open", started["name"]]) == 1
    assert "is not ready" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match="at most 16 processors") as caught:
        client.sessions.start("torch", minutes=30, cpus=17)
    assert caught.value.field == "cpus_per_node"
    assert caught.value.help == f"{live_server.url}/help/sessions/#start"


def test_arrays_are_submitted_and_cancelled_from_another_computer(
    elsewhere: Any, broker: FakeBroker, run: Any, capsys: Any
) -> None:
    words = ["submit", "--json", "--array", "0-1%1", "--", "sh", "-c", "echo task $SLURM_ARRAY_TASK_ID"]
    assert main(words) == 0
    number = json.loads(capsys.readouterr().out)["job_id"]
    run(number, 0)
    assert main(["jobs", "--history"]) == 0
    assert f"{number}_0" in capsys.readouterr().out
    assert elsewhere("logs", f"{number}_0")["text"] == "task 0\n"
    assert elsewhere("cancel", f"{number}_1") == {"cancelled": [f"{number}_1"]}
    with pytest.raises(SystemExit):
        main(["cancel", "12_x"])
    assert "123_4" in capsys.readouterr().err


def test_a_token_that_others_may_read_is_not_used(elsewhere: Any, capsys: Any) -> None:
    login = Login()
    assert login.path.stat().st_mode & 0o777 == 0o600
    login.path.chmod(0o644)
    assert main(["jobs"]) == 1
    assert "Others may read" in capsys.readouterr().err


def test_a_computer_without_the_client_gets_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("carme.cli.portal.is_remote", lambda: True)
    monkeypatch.setitem(sys.modules, "carme.client", None)  # as when an import in it fails
    for words in (["login", "https://carme.example.org"], ["jobs"]):
        assert main(words) == 1
        assert "pip install 'carme[client]'" in capsys.readouterr().err


def test_a_login_is_tried_before_it_is_saved(
    live_server: Any, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from io import StringIO

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", StringIO("carme_wrong\n"))
    assert main(["login", live_server.url]) == 1 and not Login().exists()
    assert f"then: carme login {live_server.url}" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", StringIO(f"{token}\n"))
    assert main(["login", live_server.url]) == 0
    assert "You are alice" in capsys.readouterr().out and Login().read() == (live_server.url, token)


def test_what_cannot_be_a_token_is_refused_and_not_printed(
    live_server: Any, token: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CARME_URL", live_server.url)
    # The list of tokens shows them like this.
    for wrong in (f"{token[:10]}…", f"{token}\n{token}"):
        monkeypatch.setenv("CARME_TOKEN", wrong)
        assert main(["status"]) == 1
        printed = capsys.readouterr().err
        assert "Copy the whole token." in printed and token[:10] not in printed
    # A file's end of line belongs to no token, and alone it is none.
    carme.Client(live_server.url, f"{token}\n").profile()
    monkeypatch.setenv("CARME_TOKEN", "\n")
    assert main(["status"]) == 1
    printed = capsys.readouterr().err
    assert "The token is empty." in printed and "set CARME_TOKEN to it" in printed
    monkeypatch.delenv("CARME_TOKEN")
    with pytest.raises(ConfigError, match="The token is empty") as caught:
        carme.Client(live_server.url, "")
    assert "carme login" in caught.value.remedy


def test_a_login_whose_token_is_a_number_is_refused(elsewhere: Any, capsys: Any) -> None:
    path = Login().path
    path.write_text(json.dumps(json.loads(path.read_text()) | {"token": 7}))
    assert main(["jobs"]) == 1
    printed = capsys.readouterr().err
    assert "url and token must be texts" in printed and "carme login" in printed


def test_only_a_refusal_of_the_portal_itself_blames_the_token(
    live_server: Any, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARME_URL", live_server.url)
    monkeypatch.setenv("CARME_TOKEN", "carme_wrong")
    with carme.Client() as stranger, pytest.raises(Denied) as caught:
        stranger.profile()
    # What the variable holds counts before a login.
    assert caught.value.remedy.endswith("and set CARME_TOKEN to it.")
    answers = iter(
        [
            httpx.Response(401, text="<h1>Authorization Required</h1>"),
            httpx.Response(401, json={"error": "unauthorized"}),
        ]
    )
    connection = Connection(live_server.url, token)
    connection._client = httpx.Client(
        transport=httpx.MockTransport(lambda _request: next(answers)), base_url=live_server.url
    )
    for _answer in range(2):
        with pytest.raises(Unreachable, match="not as a portal of Carme does"):
            connection.ask("GET", "profile")


def test_images_are_built_listed_and_deleted_from_elsewhere(
    elsewhere: Any, client: carme.Client, broker: FakeBroker, tmp_path: Path, capsys: Any
) -> None:
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("numpy\n")
    created = elsewhere("images", "build", "mine", "--requirements", str(wanted), "--base", "torch")
    assert (created["reference"], created["state"]) == ("mine@alice", "building")
    assert json.loads(broker.wanted[created["job_id"]].files["image.json"])["text"] == "numpy\n"
    with pytest.raises(TimeoutError):
        client.images.get("mine").wait(timeout=0)
    left = {"digest": f"sha256:{'0' * 64}", "size": 1, "packages": {"numpy": "2"}}
    broker.results[created["job_id"]] = json.dumps(left).encode()
    job = broker.queue[created["job_id"]]
    broker.put(job.model_copy(update={"state": JobState.COMPLETED, "ended": NOW, "exit_code": 0}))
    assert client.images.get("mine").wait(timeout=HANG).packages == {"numpy": "2"}
    listed = elsewhere("images", "list")
    assert {"torch", "mine@alice"} <= {image["name"] for image in listed["usable"]}
    assert client.submit(["true"], image="mine@alice").id
    broker.home.mkdir(exist_ok=True)
    file = Path(client.images.get("mine").info().file)
    file.parent.mkdir(parents=True)
    file.write_text("image")
    shared = elsewhere("images", "share", "mine", "--nobody", "--folder", str(tmp_path))
    assert (shared["project"], Path(shared["file"]).parent) == (None, tmp_path) and not file.exists()
    with pytest.raises(InvalidRequest, match="not in this project"):
        client.images.get("mine").share("vision", folder=str(tmp_path))
    assert elsewhere("images", "delete", "mine") == {"deleted": "mine"}
    capsys.readouterr()
    assert main(["images", "show", "mine"]) == 1
    assert elsewhere("images", "show", "torch")["packages"] == {"numpy": "2.1", "torch": "1.0"}
    with pytest.raises(InvalidRequest, match="either from requirements or"):
        client.images.build("x")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        client.images.build("x", definition=tmp_path / "nothing")


def test_data_is_named_from_elsewhere(
    elsewhere: Any, broker: FakeBroker, settings: Any, tmp_path: Path, capsys: Any
) -> None:
    staging = settings.SITE.staging.model_copy(update={"scratch": tmp_path})
    settings.SITE = settings.SITE.model_copy(update={"staging": staging})
    words = ["--stage", "scratch:/data/x y", "--stage", "/data/y", "--results", "/scratch/r", "--", "true"]
    assert main(["submit", "--json", *words]) == 0
    (requested,) = broker.requests_of("submit")
    stages = [(stage.target, stage.source) for stage in requested.request.stage]
    assert stages == [("scratch", "/data/x y"), ("local", "/data/y")]
    assert requested.request.results == "/scratch/r"
    capsys.readouterr()
    assert main(["submit", "--results", "here", "--", "true"]) == 1
    assert main(["submit", "--stage", "nothing-known", "--", "true"]) == 1
    assert "nothing-known" in capsys.readouterr().err


def test_a_template_from_elsewhere_starts_what_lies_on_the_cluster(
    elsewhere: Any, broker: FakeBroker, capsys: Any
) -> None:
    words = ["--template", "jax", "--image", "torch", "--gpus", "0", "--", "/home/alice/train.py"]
    assert main(["submit", *words]) == 0
    (requested,) = broker.requests_of("submit")
    assert requested.request.command == ["carme-run", "--backend", "jax", "--", "/home/alice/train.py"]
    assert (requested.request.name, requested.request.nodes, requested.request.image) == ("jax", 2, "torch")
    capsys.readouterr()
    assert main(["submit", "--template", "jax", "--image", "torch", "train.py"]) == 1
    assert "'train.py' is on this computer. Copy it there" in capsys.readouterr().err
    assert main(["submit", "--template", "jax", "--", "/home/alice/train.py"]) == 1
    assert "Add --image NAME" in capsys.readouterr().err
