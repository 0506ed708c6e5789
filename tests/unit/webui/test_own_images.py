"""Users' own images: requested, built by a job, shared, started in, deleted."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme.errors import SlurmError
from carme.images import ImageFile
from carme.images.building import RECIPE
from carme.jobs import JobState
from carme_webui.accounts.models import User
from carme_webui.cluster import broker as site_broker
from carme_webui.images.models import OwnImage
from carme_webui.images.services import settle_all
from carme_webui.projects import services as project_services
from carme_webui.projects.models import Membership, Project

from .conftest import PASSWORD, Browser, Program, program_of, text
from .fake_broker import NOW, FakeBroker
from .fake_hub import FakeHub

DIGEST = f"sha256:{'ab' * 32}"
PROPOSED = {"name": "mine", "kind": "requirements", "base": "torch", "text": "numpy==2.1\n"}
PAGE = "/images/at/mine@alice/"


@pytest.fixture
def vision(alice: User, broker: FakeBroker) -> Project:
    """A project that alice manages."""
    admin = User.objects.create_user("root1", password=PASSWORD, is_staff=True)
    return project_services.create(admin, "vision", "Computer vision", alice, site_broker())


def end(broker: FakeBroker, row: OwnImage, state: str = "COMPLETED", **result: Any) -> None:
    """End the job that builds the image, with this result."""
    assert row.job_id is not None
    job = broker.queue[row.job_id]
    broker.put(job.model_copy(update={"state": JobState(state), "ended": NOW, "exit_code": 0}))
    left = {"digest": DIGEST, "size": 5, "packages": {"numpy": "2.1"}, "entry_points": {"lab": "JupyterLab"}}
    broker.results[row.job_id] = json.dumps(left | result).encode()
    settle_all(site_broker())
    row.refresh_from_db()


def started(hub: FakeHub) -> dict[str, Any]:
    """What the hub was last requested to start."""
    return [body["user_options"] for _path, body in hub.called("POST") if "user_options" in (body or {})][-1]


def start(browser: Browser, image: str) -> Any:
    return browser.send("/", "/sessions/start/", image=image, gpus_per_node=1, nodes=1, minutes=30)


def test_an_image_is_built_by_a_job_and_a_session_starts_in_it(
    browser: Browser, broker: FakeBroker, hub: FakeHub, at_once: None
) -> None:
    answer = browser.send("/images/build/", "/images/build/", **PROPOSED)
    assert (answer.status_code, answer["Location"]) == (302, PAGE)
    row = OwnImage.objects.get()
    requested = broker.requests_of("submit")[0]
    assert requested.user == "alice" and requested.request.image is None
    recipe = json.loads(requested.request.files[RECIPE])
    assert (recipe["text"], recipe["base"], recipe["shared"]) == ("numpy==2.1\n", "torch", False)
    assert recipe["file"] == row.file and row.file.startswith(
        f"{broker.home}/.local/share/carme/images/mine-"
    )
    assert "Being built" in text(browser.get(PAGE))
    assert start(browser, "mine@alice").status_code == 422, "nothing starts in what is not there yet"

    end(broker, row)
    page = text(browser.get(PAGE))
    assert "Ready" in page and "numpy 2.1" in page and DIGEST in page
    assert "mine@alice" in text(browser.get("/"))
    assert start(browser, "mine@alice").status_code == 302
    options = started(hub)
    assert options["image"] == "mine@alice"
    assert options["image_file"] == {"file": row.file, "digest": DIGEST}


def test_the_sites_images_show_their_packages(browser: Browser, program: Program) -> None:
    assert '<a href="/images/site/torch/">Torch &lt;lab&gt;</a>' in browser.get("/images/").content.decode()
    page = browser.get("/images/site/torch/").content.decode()
    assert "Torch &lt;lab&gt;" in page and "JupyterLab" in page
    assert "<li>numpy 2.1</li><li>torch 1.0</li>" in page
    assert browser.get("/images/site/nothing/").status_code == 404
    reported = program.get("/api/v1/images/at/torch").json()
    assert (reported["name"], reported["packages"]) == ("torch", {"numpy": "2.1", "torch": "1.0"})
    assert "packages" not in program.get("/api/v1/images").json()[0]
    refused = program.get("/api/v1/images/at/nothing")
    assert (refused.status_code, "There is no image 'nothing'" in refused.json()["detail"]) == (404, True)


def test_a_failed_build_says_why(browser: Browser, broker: FakeBroker, program: Program) -> None:
    browser.send("/images/build/", "/images/build/", **PROPOSED)
    row = OwnImage.objects.get()
    end(broker, row, "FAILED")
    assert row.state == "failed" and row.problem
    assert row.problem.split(";")[0] in text(browser.get(PAGE)).replace("&#x27;", "'")
    assert start(browser, "mine@alice").status_code == 422


@pytest.mark.parametrize(
    "result",
    [{"digest": "x"}, {"size": -1}, {"packages": {"a" * 300: "1"}}, {"more": 1}, {"entry_points": []}],
)
def test_a_result_that_makes_no_sense_is_a_failed_build(
    browser: Browser, broker: FakeBroker, result: dict[str, Any]
) -> None:
    browser.send("/images/build/", "/images/build/", **PROPOSED)
    row = OwnImage.objects.get()
    end(broker, row, **result)
    assert row.state == "failed" and row.digest == ""


def test_markup_of_a_build_is_shown_as_text(browser: Browser, broker: FakeBroker) -> None:
    browser.send("/images/build/", "/images/build/", **PROPOSED | {"text": "<script>x</script>"})
    end(broker, OwnImage.objects.get(), packages={"<b>bold": "1"}, description="<i>it")
    page = text(browser.get(PAGE))
    assert "<script>x" not in page and "<b>bold" not in page and "<i>it" not in page
    assert "&lt;b&gt;bold" in page and DIGEST in page


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"name": "Mine"}, "name", "begins with a letter or digit"),
        ({"name": "a@b"}, "name", "begins with a letter or digit"),
        ({"name": "../x"}, "name", "begins with a letter or digit"),
        ({"base": "none"}, "base", "There is no image"),
        ({"text": " \n"}, "text", "is empty"),
        ({"kind": "definition"}, "text", "Bootstrap: localimage"),
        ({"kind": "other"}, "kind", "'definition' or"),
        ({"folder": "relative"}, "folder", "absolute path"),
        ({"folder": "/a/../b"}, "folder", "absolute path"),
        ({"folder": "/a:b"}, "folder", "absolute path"),
        ({"project": "vision"}, "project", "not in this project"),
        ({"project": "\0"}, "project", "not in this project"),
    ],
)
def test_what_cannot_be_built_is_refused(
    program: Program, broker: FakeBroker, change: dict[str, str], field: str, sentence: str
) -> None:
    answer = program.ask("POST", "images/own", PROPOSED | change)
    problem = answer.json()
    assert (answer.status_code, problem["field"]) == (422, field)
    assert sentence in problem["detail"]
    assert not broker.requests_of("submit") and not OwnImage.objects.exists()


def test_nothing_stays_of_an_image_whose_job_is_refused(program: Program, broker: FakeBroker) -> None:
    broker.refusal = SlurmError("Slurm refused: it says no.", "Correct it.")
    assert program.ask("POST", "images/own", PROPOSED).status_code == 409
    assert not OwnImage.objects.exists()


def test_the_api_builds_shows_and_deletes(program: Program, broker: FakeBroker, alice: User) -> None:
    assert program_of(alice, "jobs").ask("POST", "images/own", PROPOSED).status_code == 403
    response = program.ask("POST", "images/own", PROPOSED)
    assert (response.status_code, response.json()["state"]) == (201, "building")
    assert program.ask("POST", "images/own", PROPOSED).json()["field"] == "name"
    row = OwnImage.objects.get()
    end(broker, row)
    shown = program.ask("GET", "images/own/mine").json()
    assert (shown["state"], shown["digest"], shown["reference"]) == ("ready", DIGEST, "mine@alice")
    assert "mine@alice" in [entry["name"] for entry in program.ask("GET", "images").json()]
    answer = program.ask("POST", "jobs", {"command": ["true"], "image": "mine@alice", "minutes": 5})
    assert answer.status_code == 201
    assert broker.requests_of("submit")[-1].request.image_file == ImageFile(file=row.file, digest=DIGEST)

    Path(row.file).parent.mkdir(parents=True)
    Path(row.file).write_text("image")
    assert program.ask("DELETE", "images/own/mine").status_code == 204
    assert not Path(row.file).exists() and not OwnImage.objects.exists()


def test_nobody_uses_an_image_that_is_not_shared(
    browser: Browser, bobs_browser: Browser, bob: User, broker: FakeBroker, hub: FakeHub
) -> None:
    browser.send("/images/build/", "/images/build/", **PROPOSED)
    end(broker, OwnImage.objects.get())
    for page in (PAGE, f"{PAGE}live/", f"{PAGE}delete/"):
        assert bobs_browser.get(page).status_code == 404
    assert bobs_browser.get("/images/at/%00@alice/").status_code == 404
    assert "mine@alice" not in text(bobs_browser.get("/images/"))
    assert start(bobs_browser, "mine@alice").status_code == 422
    api = program_of(bob)
    assert api.ask("GET", "images/own/mine@alice").status_code == 404
    assert api.ask("DELETE", "images/own/mine@alice").status_code == 404
    for body in (
        {"command": ["true"], "image": "mine@alice", "minutes": 5},
        {"command": ["true"], "image": "mine", "minutes": 5},
    ):
        assert api.ask("POST", "jobs", body).status_code == 422
    requested = {"image": "mine@alice", "minutes": 5, "image_file": {"file": "/x.sif", "digest": DIGEST}}
    assert api.ask("POST", "sessions", requested).status_code == 422
    assert OwnImage.objects.filter(owner__username="alice").exists()


def test_members_of_a_project_start_in_what_is_shared_until_they_leave(
    browser: Browser,
    bobs_browser: Browser,
    bob: User,
    vision: Project,
    broker: FakeBroker,
    hub: FakeHub,
    at_once: None,
) -> None:
    proposed = PROPOSED | {"project": "vision"}
    answer = browser.send("/images/build/", "/images/build/", **proposed)
    assert answer.status_code == 422 and "cannot read your home" in text(answer)
    proposed |= {"folder": "/scratch/vision"}
    assert browser.send("/images/build/", "/images/build/", **proposed).status_code == 302
    row = OwnImage.objects.get()
    recipe = json.loads(broker.requests_of("submit")[0].request.files[RECIPE])
    assert recipe["shared"] and row.file.startswith("/scratch/vision/mine-")
    end(broker, row)
    assert bobs_browser.get(PAGE).status_code == 404

    member = Membership.objects.create(project=vision, user=bob)
    page = text(bobs_browser.get(PAGE))
    assert "numpy 2.1" in page and PROPOSED["text"] not in page and "Delete" not in page
    assert bobs_browser.send("/images/", f"{PAGE}delete/").status_code == 404
    assert start(bobs_browser, "mine@alice").status_code == 302
    assert started(hub)["image_file"]["digest"] == DIGEST
    member.delete()
    assert start(bobs_browser, "mine@alice").status_code == 422


def test_an_image_that_is_built_is_shared_and_taken_back(
    browser: Browser,
    bobs_browser: Browser,
    bob: User,
    vision: Project,
    broker: FakeBroker,
    hub: FakeHub,
    at_once: None,
    tmp_path: Path,
) -> None:
    Membership.objects.create(project=vision, user=bob)
    share = f"{PAGE}share/"
    browser.send("/images/build/", "/images/build/", **PROPOSED)
    row = OwnImage.objects.get()
    assert "is not ready" in text(browser.send(share, share, project="vision", folder=str(tmp_path)))
    end(broker, row)
    first = Path(row.file)
    first.parent.mkdir(parents=True)
    first.write_bytes(b"image")
    first.chmod(0o600)

    assert "cannot read your home" in text(browser.send(share, share, project="vision"))
    assert browser.send(share, share, project="speech", folder=str(tmp_path)).status_code == 422
    answer = browser.send(share, share, project="vision", folder=str(tmp_path / "missing"))
    assert answer.status_code == 422 and first.exists()
    assert bobs_browser.get(PAGE).status_code == 404 and bobs_browser.get(share).status_code == 404

    assert browser.send(share, share, project="vision", folder=f"{tmp_path}/").status_code == 302
    row.refresh_from_db()
    (file,) = tmp_path.iterdir()
    assert str(file) == row.file and file.read_bytes() == b"image" and not first.exists()
    assert file.stat().st_mode & 0o777 == 0o644
    assert "mine@alice" in text(bobs_browser.get("/"))
    assert bobs_browser.get(share).status_code == 404
    assert start(bobs_browser, "mine@alice").status_code == 302
    assert started(hub)["image_file"] == {"file": row.file, "digest": DIGEST}

    assert browser.send(share, share, project="").status_code == 302
    (private,) = tmp_path.iterdir()
    assert private != file and private.stat().st_mode & 0o777 == 0o600
    assert bobs_browser.get(PAGE).status_code == 404
    assert start(bobs_browser, "mine@alice").status_code == 422
    assert "mine@alice" in text(browser.get("/"))


def test_a_file_that_cannot_be_removed_keeps_the_image(browser: Browser, broker: FakeBroker) -> None:
    browser.send("/images/build/", "/images/build/", **PROPOSED | {"folder": "/proc/1"})
    row = OwnImage.objects.get()
    end(broker, row)
    OwnImage.objects.update(file="/proc/1/status")
    browser.send("/images/", f"{PAGE}delete/")
    assert OwnImage.objects.exists()
