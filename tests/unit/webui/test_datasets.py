"""Datasets that users enter from what they have uploaded, and the start form that takes them."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from carme.broker import protocol
from carme.datasets import OWN
from carme.jobs import Stage
from carme_webui.sessions.models import Session

from .conftest import FOLDER, Browser, Program, words
from .fake_broker import FakeBroker
from .fake_hub import FakeHub
from .session_steps import start
from .test_files import key, put

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.fixture
def home(broker: FakeBroker, settings: Any, tmp_path: Path) -> Path:
    (broker.home / OWN).mkdir(parents=True)
    staging = django_settings.SITE.staging.model_copy(update={"datasets": tmp_path / "site"})
    settings.SITE = django_settings.SITE.model_copy(update={"staging": staging})
    return broker.home


def archive() -> bytes:
    """Two files in a folder, packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in (("digits/one", b"1"), ("digits/two", b"22")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def entered(digits: str, path: str) -> dict[str, Any]:
    """A version as the catalogue has it."""
    about = {"files": 3, "size": 5, "added": "2026-01-01T00:00:00Z"}
    return {"digest": f"blake3:{digits * 32}", "path": path, **about}


def run(request: Any, home: Path) -> str:
    """What the job prints, which runs the real command as a node would."""
    program, *words = request.command
    assert program.endswith("/carme")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from carme.cli.main import main; sys.exit(main())", *words],
        env={**os.environ, "HOME": str(home), "CARME_CONFIG": str(FOLDER / "carme.toml")}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_an_upload_becomes_a_dataset_that_sessions_start_with(
    browser: Browser, broker: FakeBroker, hub: FakeHub, home: Path
) -> None:
    assert put(browser, home / "digits.tar.gz", archive()).status_code == 200
    assert f"/datasets/add/?path={key(home / 'digits.tar.gz')}" in browser.get("/files/").content.decode()
    page = f"/datasets/add/?path={key(home / 'digits.tar.gz')}"
    form = browser.get(page).content.decode()
    assert ">Name</label>" in form and form.count(">optional<") == 2, "as in all other forms"
    html = browser.get(page).content.decode()
    assert 'value="digits"' in html and f'value="{home}/digits.tar.gz"' in html

    fields = {"name": "digits", "path": f"{home}/digits.tar.gz", "title": "--site", "licence": "CC0 <b>"}
    answer = browser.send(page, page, **fields)
    (requested,) = [request for request in broker.requests if isinstance(request, protocol.Submit)]
    assert answer.status_code == 302 and requested.user == "alice" and requested.request.gpus_per_node == 0
    assert "has version" in run(requested.request, home)

    html = browser.get("/datasets/").content.decode()
    assert "digits" in html and "CC0 &lt;b&gt;" in html and f"<code>{home}/digits</code>" in html
    message = words(browser.get("/datasets/"))
    assert "yours" in message and "--site" in message and " 2 " in message

    assert 'value="digits"' in browser.get("/?stage=digits").content.decode()
    assert start(browser, stage="digits").status_code == 302
    assert hub.servers
    (stage,) = Session.objects.get().requested_options.stage
    assert (stage.source, stage.name) == (f"{home}/digits", "digits")
    assert stage.version.startswith("blake")


def test_a_command_that_is_not_installed_beside_python_is_found_by_its_name(
    browser: Browser, broker: FakeBroker, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/carme"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr("sysconfig.get_path", lambda *_, **__: str(tmp_path / "none"))
    page = "/datasets/add/"
    assert browser.send(page, page, name="x", path="/home/x", title="", licence="").status_code == 302
    (requested,) = [request for request in broker.requests if isinstance(request, protocol.Submit)]
    assert requested.request.command[0] == str(program)


def test_copies_and_versions_are_reported(
    browser: Browser, broker: FakeBroker, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = entered("ab", "/data/x")
    older = entered("ef", "/data/<b>")
    reported = f'{{"title": "X", "licence": "", "versions": [{json.dumps(older)}, {json.dumps(version)}]}}'
    (home / OWN / "x.json").write_text(reported)
    for name, wrong in (("broken", "{"), ("list", "[]"), ("none", '{"versions": []}'), ("a b", reported)):
        (home / OWN / f"{name}.json").write_text(wrong)
    os.mkfifo(home / OWN / "pipe.json")
    (home / OWN / "loop.json").symlink_to("loop.json")
    monkeypatch.setattr(
        "carme_webui.datasets.views._uid", lambda user: 4711 if user.username == "alice" else None
    )
    feature = Stage(source="/data/x", version=str(version["digest"])).feature(4711)
    nodes = [
        node.model_copy(update={"features": [feature] if node.name == "n2" else []})
        for node in broker.cluster.nodes
    ]
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes})
    message = words(browser.get("/datasets/"))
    line = r"All 2 versions x efefefefefef 3 files, 5 B, added .+? ago /data/&lt;b&gt;"
    assert re.search(line, message)
    assert 'href="/?stage=x@efefefefefef"' in browser.get("/datasets/").content.decode()
    assert "abababababab" in message and "not there" in message and "yours n2 /data/x" in message
    assert "broken" not in message and "pipe" not in message


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "a/b"}, "1 to 64 letters"),
        ({"path": "digits"}, "absolute path"),
        ({"path": "/home/\x01x"}, "absolute path"),
        ({"name": ""}, "required"),
    ],
)
def test_a_wrong_dataset_is_refused_with_a_sentence(
    browser: Browser, broker: FakeBroker, home: Path, fields: dict[str, str], sentence: str
) -> None:
    answer = browser.send(
        "/datasets/add/", "/datasets/add/", **{"name": "x", "path": "/home/x", "title": "", **fields}
    )
    assert answer.status_code == 422 and sentence in answer.content.decode()
    assert not [request for request in broker.requests if isinstance(request, protocol.Submit)]


def test_programs_name_own_datasets_too(
    program: Program, browser: Browser, broker: FakeBroker, home: Path
) -> None:
    version = entered("cd", "/data/y")
    (home / OWN / "y.json").write_text(json.dumps({"versions": [version]}))
    requested = {"command": ["true"], "stage": ["y"]}
    assert program.ask("post", "jobs", requested).status_code == 201
    (job,) = [request for request in broker.requests if isinstance(request, protocol.Submit)]
    assert (job.request.stage[0].source, job.request.stage[0].version) == ("/data/y", version["digest"])
    refused = program.ask("post", "jobs", requested | {"stage": ["z"]})
    assert refused.status_code == 422 and "there are: y" in refused.json()["detail"]
