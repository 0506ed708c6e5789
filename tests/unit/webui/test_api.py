"""The REST API: who may, what is refused, and that it does what the pages do."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from carme.errors import SlurmError
from carme_webui.accounts.models import User
from carme_webui.api.models import SCOPES, Token
from carme_webui.bookings.models import Booking
from carme_webui.jobs.models import Job
from carme_webui.sessions.models import Session

from .conftest import Browser, Program, program_of
from .fake_broker import FakeBroker, make_job

OPTIONS = {"image": "torch", "minutes": 60}


def problem(answer: Any, status: int) -> dict[str, Any]:
    """What the API says when it refuses, having seen that it says it properly."""
    assert answer.status_code == status, answer.content
    assert answer["Content-Type"] == "application/problem+json"
    message = json.loads(answer.content)
    assert message["status"] == status and message["title"] and message["detail"]
    return message


@pytest.fixture
def booked(settings: Any, broker: FakeBroker) -> None:
    """Nodes may be booked."""
    site = settings.SITE
    rules = site.bookings.model_copy(update={"enabled": True, "share_percent": 100})
    settings.SITE = site.model_copy(update={"bookings": rules})


def proposed(hours: float = 2.0, **fields: Any) -> dict[str, Any]:
    start = (timezone.now() + timedelta(hours=hours)).replace(microsecond=0)
    wanted = {"partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "minutes": 60}
    return wanted | {"start": start.isoformat()} | fields


# --- tokens ----------------------------------------------------------------------------------------------


def test_a_token_is_shown_once_and_stored_as_a_digest(browser: Browser, alice: User) -> None:
    page = browser.send("/tokens/", "/tokens/", label="my laptop", days="30", scopes=["jobs"])
    secret = page.content.decode().split('<p class="secret" tabindex="0">')[1].split("<")[0]
    assert secret.startswith("carme_") and len(secret) > 40
    assert page["Cache-Control"].find("no-store") >= 0
    row = Token.objects.get()
    assert secret not in str(vars(row)) and row.scopes == ["jobs"]
    again = browser.get("/tokens/").content.decode()
    assert "my laptop" in again and secret not in again
    message = Program(secret).ask("get", "profile").json()
    assert message["user"] == "alice" and message["scopes"] == ["jobs"]


def test_a_revoked_token_is_of_no_use(browser: Browser, alice: User) -> None:
    program = program_of(alice)
    assert program.ask("get", "profile").status_code == 200
    browser.send("/tokens/", f"/tokens/{Token.objects.get().pk}/revoke/")
    assert "revoked" in problem(program.ask("get", "profile"), 401)["detail"]


def test_nobody_revokes_anothers_token(browser: Browser, bob: User) -> None:
    program = program_of(bob)
    browser.send("/tokens/", f"/tokens/{Token.objects.get().pk}/revoke/")
    assert program.ask("get", "profile").status_code == 200
    assert "test" not in browser.get("/tokens/").content.decode().split("<main")[1].split("New token")[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"days": "0"},
        {"days": "9999"},
        {"days": "x"},
        {"label": ""},
        {"label": "a\u202eb"},
        {"scopes": ["root"]},
    ],
)
def test_a_token_that_cannot_be_is_refused(browser: Browser, fields: dict[str, Any]) -> None:
    page = browser.send("/tokens/", "/tokens/", **({"label": "x", "days": "30"} | fields))
    assert page.status_code == 422 and not Token.objects.exists()


def test_expired_tokens_and_closed_accounts_open_nothing(alice: User) -> None:
    program = program_of(alice)
    Token.objects.update(expires=timezone.now() - timedelta(seconds=1))
    problem(program.ask("get", "profile"), 401)
    Token.objects.update(expires=timezone.now() + timedelta(days=1))
    assert program.ask("get", "profile").status_code == 200
    User.objects.update(is_active=False)
    problem(program.ask("get", "profile"), 401)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer carme_x", "Basic YTpi", "Bearer \xff", "Bearer " + "x" * 5000]
)
def test_without_a_token_there_is_nothing(db: None, header: str) -> None:
    stranger = Program("")
    answer = stranger.get("/api/v1/jobs", headers={"authorization": header} if header else {})
    message = problem(answer, 401)
    assert answer["WWW-Authenticate"] == "Bearer" and "API tokens" in message["detail"]


def test_a_login_is_no_token(browser: Browser) -> None:
    """Otherwise a page of another site could use the API with a browser's cookies."""
    problem(browser.get("/api/v1/jobs"), 401)


@pytest.mark.parametrize(
    ("scope", "method", "path", "body"),
    [
        ("sessions", "post", "sessions", OPTIONS),
        ("sessions", "delete", "sessions/s12345678", None),
        ("sessions", "post", "sessions/s12345678/extend", {"minutes": 5}),
        ("jobs", "post", "jobs", {"command": ["true"]}),
        ("jobs", "post", "jobs/check", {"command": ["true"]}),
        ("jobs", "put", f"jobs/inputs?id={'0' * 32}&offset=0&size=1", None),
        ("jobs", "delete", "jobs/1", None),
        ("jobs", "post", "jobs/1/extend", {"minutes": 5}),
        ("jobs", "post", "jobs/1/resubmit", None),
        ("bookings", "post", "bookings", {**proposed()}),
        ("bookings", "patch", "bookings/carme-0123456789ab", {}),
        ("bookings", "delete", "bookings/carme-0123456789ab", None),
        ("bookings", "put", "bookings/carme-0123456789ab/offer", {"user": "bob"}),
        ("images", "delete", "images/own/mine", None),
        ("files-read", "get", "files", None),
        ("files-read", "get", "files/content?path=/etc/passwd", None),
        ("files", "delete", "files?path=/etc/passwd", None),
        ("files", "post", "files/folders?path=/tmp", {"name": "x"}),
        ("sessions", "post", "presets", {"name": "x", "options": OPTIONS}),
        ("projects", "post", "projects/vision/invitations", {"user": "bob"}),
        ("projects", "post", "invitations/1", {"accept": True}),
        ("profile", "post", "notices/read", None),
        ("profile", "put", "notices/kinds/project", {"page": True, "mail": False}),
    ],
)
def test_a_token_does_only_what_it_is_for(
    alice: User, broker: FakeBroker, scope: str, method: str, path: str, body: Any
) -> None:
    other_scopes = set(SCOPES) - {scope}
    message = problem(program_of(alice, *other_scopes).ask(method, path, body), 403)
    assert f"'{scope}'" in message["detail"]
    assert not [request for request in broker.requests if request.method != "cluster"]


def test_too_many_requests_have_to_wait(settings: Any, program: Program, bob: User) -> None:
    portal = settings.SITE.portal.model_copy(update={"requests_per_minute": 3})
    settings.SITE = settings.SITE.model_copy(update={"portal": portal})
    answers = [program.ask("get", "profile") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert "Try again in" in problem(answers[-1], 429)["detail"]
    assert 0 < int(answers[-1]["Retry-After"]) <= 61
    assert program_of(bob).ask("get", "profile").status_code == 200, "others are not kept waiting"
    guesses = [Program("carme_guess").ask("get", "profile").status_code for _ in range(4)]
    assert guesses == [401, 401, 401, 429]


# --- problems --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"), [("get", "nothing", 404), ("put", "jobs", 405), ("get", "jobs/0x1", 422)]
)
def test_whatever_refuses_answers_with_a_problem(
    program: Program, method: str, path: str, status: int
) -> None:
    answer = program.ask(method, path)
    problem(answer, status)
    assert status != 405 or set(answer["Allow"].split(", ")) >= {"GET", "POST"}


def test_the_sentences_are_those_of_the_page(program: Program, browser: Browser, broker: FakeBroker) -> None:
    message = problem(program.ask("post", "sessions", OPTIONS | {"nodes": 9}), 422)
    assert message["field"] == "nodes"
    assert message["help"] == "/help/sessions/#start"
    page = browser.send("/", "/sessions/start/", image="torch", nodes="9", gpus_per_node="0", minutes="60",
                        partition="gpu")  # fmt: skip
    from html import unescape

    assert message["detail"] in unescape(page.content.decode())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "minutes"),
        ({"image": "torch"}, "minutes"),
        ({"image": "torch", "minutes": "soon"}, "minutes"),
        ({"image": "torch", "minutes": 0}, "minutes"),
        ({"image": "none", "minutes": 5}, "image"),
        ({"image": "torch", "minutes": 5, "colour": "red"}, "colour"),
        ({"image": "torch", "minutes": 5, "title": "a\u202eb"}, "title"),
        ({"image": "torch", "minutes": 5, "app": "none"}, "app"),
        ({"image": "torch", "minutes": 5, "reservation": "carme-0123456789ab"}, "reservation"),
    ],
)
def test_what_cannot_be_started_is_refused(
    program: Program, broker: FakeBroker, body: Any, field: str
) -> None:
    message = problem(program.ask("post", "sessions", body), 422)
    assert message["field"] == field and "Denied" not in message["detail"]
    assert not Session.objects.exists()


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '"x"', '{"image": "\\ud800", "minutes": 1}', "\x00"])
def test_an_invalid_request_is_refused(program: Program, broker: FakeBroker, body: str) -> None:
    answer = program.generic("POST", "/api/v1/sessions", body, content_type="application/json")
    assert answer.status_code in (400, 422)
    problem(answer, answer.status_code)


def test_a_refusal_names_the_page_of_the_help_that_says_more(
    program: Program, browser: Browser, broker: FakeBroker
) -> None:
    message = problem(program.ask("post", "sessions", OPTIONS | {"minutes": 100_000}), 422)
    assert message["help"] == "/help/sessions/#time"
    assert browser.get("/help/sessions/").status_code == 200
    assert problem(program.ask("get", "nothing"), 404)["help"] is None


def test_a_broker_that_is_down_is_reported(program: Program) -> None:
    message = problem(program.ask("get", "cluster"), 503)
    assert message["code"] == "broker-unavailable" and "does not answer" in message["detail"]


def test_what_slurm_refuses_is_reported(program: Program, broker: FakeBroker) -> None:
    broker.refusal = SlurmError("Slurm says no.", "Ask for less.", code="limit")
    assert (
        problem(program.ask("post", "jobs", {"command": ["true"]}), 409)["detail"]
        == "Slurm says no. Ask for less."
    )


# --- sessions --------------------------------------------------------------------------------------------


def test_a_session_from_start_to_stop(program: Program, broker: FakeBroker, hub: Any, at_once: None) -> None:
    started = program.ask("post", "sessions", OPTIONS | {"title": "mine", "name": "sabcdefgh"})
    assert started.status_code == 201, started.content
    assert started.json()["name"] == "sabcdefgh" and started.json()["title"] == "mine"
    assert program.ask("post", "sessions", OPTIONS | {"name": "sabcdefgh"}).status_code == 200
    assert [row["name"] for row in program.ask("get", "sessions").json()["items"]] == ["sabcdefgh"]
    assert program.ask("delete", "sessions/sabcdefgh").status_code == 202
    assert program.ask("get", "sessions/sabcdefgh").json()["state"] in ("stopping", "ended")
    assert program.ask("get", "sessions", active="false", state="ready").json()["items"] == []


# --- jobs ------------------------------------------------------------------------------------------------


def test_jobs_come_in_parts_newest_first(program: Program) -> None:
    Job.store(make_job(number, state="COMPLETED") for number in range(1, 8))
    Job.store([make_job(99, user="bob")])
    seen: list[int] = []
    cursor: dict[str, Any] = {}
    while True:
        page = program.ask("get", "jobs", limit=3, **cursor).json()
        seen += [job["id"] for job in page["items"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert seen == [7, 6, 5, 4, 3, 2, 1]


def test_jobs_are_filtered(program: Program) -> None:
    now = timezone.now()
    Job.store(
        [
            make_job(1, name="train resnet", state="COMPLETED", submitted=now - timedelta(days=400)),
            make_job(2, name="Train bert", state="FAILED", submitted=now, kind="batch"),
            make_job(3, name="notebook", state="RUNNING", submitted=now, partition="cpu"),
        ]
    )

    def found(**query: Any) -> list[int]:
        return [job["id"] for job in program.ask("get", "jobs", **query).json()["items"]]

    assert found(q="TRAIN") == [2, 1] and found(q="3") == [3]
    assert found(state="failed") == [2] and found(kind="batch") == [2] and found(partition="cpu") == [3]
    assert found(since=(now - timedelta(days=1)).isoformat()) == [3, 2]
    assert found(until=(now - timedelta(days=1)).isoformat()) == [1]
    for wrong in ({"since": "yesterday"}, {"since": "0001-01-01T00:00:00Z"}, {"state": "x"}, {"limit": 0},
                  {"cursor": "x"}, {"q": "a\0b"}, {"since": "2026-01-01T00:00:00"}):  # fmt: skip
        message = problem(program.ask("get", "jobs", **wrong), 422)
        assert message["field"] == next(iter(wrong))


def test_the_number_of_questions_does_not_grow_with_jobs(program: Program, browser: Browser) -> None:
    def count(ask: Any) -> int:
        ask()
        with CaptureQueriesContext(
            connection,
        ) as requested:
            ask()
        return len(requested)

    paths = [
        lambda: program.ask("get", "jobs"),
        lambda: browser.get("/jobs/"),
        lambda: program.ask("get", "sessions"),
    ]
    Job.store([make_job(1)])
    few = [count(ask) for ask in paths]
    Job.store(make_job(number) for number in range(2, 60))
    assert [count(ask) for ask in paths] == few


@pytest.mark.parametrize(
    "body",
    [
        {"command": ["python", "train.py"]},
        {"script": "#!/bin/bash\necho hello\n", "arguments": ["a b", "$(reboot)"]},
        {"script_path": "train.sh", "gpus_per_node": 1, "image": "torch", "minutes": 5},
    ],
)
def test_a_batch_job_is_submitted_as_me(program: Program, broker: FakeBroker, body: Any) -> None:
    broker.scripts["alice", "train.sh"] = "#!/usr/bin/env python3\nprint(1)\n"
    assert program.ask("post", "jobs/check", body).json()["nodes"] == "n1"
    assert not broker.requests_of("submit")
    answer = program.ask("post", "jobs", body)
    assert answer.status_code == 201, answer.content
    (sent,) = broker.requests_of("submit")
    assert sent.user == "alice" and sent.request.kind == "batch"
    if "script" in body:
        assert sent.request.command[-2:] == ["a b", "$(reboot)"] and "reboot" not in sent.request.command[2]
        assert sent.request.files == {"script": body["script"]}
    if "script_path" in body:
        assert sent.request.command == ["/usr/bin/env", "python3", f"{broker.homes}/alice/train.sh"]
    number = answer.json()["id"]
    assert program.ask("get", f"jobs/{number}").json()["state"] == "PENDING"
    again = program.ask("post", f"jobs/{number}/resubmit").json()["id"]
    assert broker.wanted[again] == broker.wanted[number]
    assert program.ask("delete", f"jobs/{again}").status_code == 204
    assert program.ask("get", f"jobs/{number}/recipe").json()["request"]["nodes"] == 1


@pytest.mark.parametrize("how", ["script", "script_path"])
def test_sbatch_lines_count_where_the_request_says_nothing(
    program: Program, broker: FakeBroker, how: str
) -> None:
    text = "#!/bin/sh\n#SBATCH -J mine --gpus=2 -t 0:30:00 --mem=2G\n#SBATCH --mail-type=END -D here\ntrue\n"
    broker.scripts["alice", "a.sh"] = text
    body = {how: text if how == "script" else "a.sh", "gpus_per_node": 1}
    assert program.ask("post", "jobs", body).json()["ignored"] == ["--mail-type", "--chdir"]
    (requested,) = broker.requests_of("submit")
    request = requested.request
    assert (request.name, request.gpus_per_node, request.minutes) == ("mine", 1, 30)
    assert request.memory_mb_per_node == 2048
    wrong = program.ask("post", "jobs", {"script": "#SBATCH --nodes=many\n"})
    assert wrong.status_code in (400, 422) and "Line 1" in wrong.content.decode()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "script"),
        ({"command": ["a"], "script": "b"}, "command"),
        ({"command": []}, "command"),
        ({"command": ["a\0b"]}, "command[0]"),
        ({"script": " \n"}, "script"),
        ({"script": "x" * 300_000}, "script"),
        ({"script_path": "nothing.sh"}, "script_path"),
        ({"command": ["a"], "nodes": 0}, "nodes"),
        ({"command": ["a"], "nodes": 50}, "nodes"),
        ({"command": ["a"], "minutes": 10**9}, "minutes"),
        ({"command": ["a"], "name": "a;b"}, "name"),
        ({"command": ["a"], "workdir": "relative"}, "workdir"),
        ({"command": ["a"], "environment": {"A B": "c"}}, "environment"),
        ({"command": ["a"], "kind": "session"}, "kind"),
    ],
)
def test_what_cannot_be_submitted_is_refused(
    program: Program, broker: FakeBroker, body: Any, field: str
) -> None:
    assert problem(program.ask("post", "jobs", body), 422)["field"] == field
    assert not broker.queue


def test_a_log_is_read_in_parts(program: Program, broker: FakeBroker) -> None:
    broker.put(make_job(1))
    broker.logs[1] = b"first second"
    part = program.ask("get", "jobs/1/log", limit=6).json()
    assert part == {"text": "first ", "offset": 6, "size": 12, "over": False}
    assert program.ask("get", "jobs/1/log", offset=6).json()["text"] == "second"
    assert program.ask("get", "jobs/1/result").json()["text"] == ""


# --- bookings --------------------------------------------------------------------------------------------


def test_a_booking_from_the_free_times_to_its_deletion(
    program: Program, broker: FakeBroker, booked: None
) -> None:
    (kind,) = program.ask("get", "bookings/kinds").json()
    assert kind["gpu_type"] == "a100"
    slots = program.ask("get", "bookings/slots", **proposed()).json()
    assert slots
    response = program.ask("post", "bookings", proposed(start=slots[0]["start"], title="mine"))
    assert response.status_code == 201, response.content
    name = response.json()["name"]
    assert name in broker.reservations and response.json()["reserved"]
    taken = problem(program.ask("post", "bookings", proposed(start=slots[0]["start"])), 422)
    assert taken["field"]
    longer = program.ask("patch", f"bookings/{name}", {"minutes": 90})
    assert longer.json()["minutes"] == 90 and longer.json()["title"] == "mine"
    assert [row["name"] for row in program.ask("get", "bookings").json()["items"]] == [name]
    assert [row["name"] for row in program.ask("get", "bookings/usable").json()] == [name]
    assert program.ask("delete", f"bookings/{name}").json()["state"] == "ended"
    assert name not in broker.reservations
    assert problem(program.ask("patch", f"bookings/{name}", {"minutes": 60}), 422)["detail"].startswith(
        "This booking is over."
    )


@pytest.mark.parametrize(
    "start", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "2026-01-01T00:00:00", "soon"]
)
def test_times_that_cannot_be_are_refused(
    program: Program, broker: FakeBroker, booked: None, start: str
) -> None:
    assert problem(program.ask("post", "bookings", proposed(start=start)), 422)["field"] == "start"
    assert problem(program.ask("get", "bookings/slots", **proposed(start=start)), 422)["field"] == "start"


def test_only_managers_decide(
    program: Program, broker: FakeBroker, booked: None, alice: User, bob: User
) -> None:
    name = program.ask("post", "bookings", proposed()).json()["name"]
    Booking.objects.update(state="requested", reserved=None)
    problem(program.ask("post", f"bookings/{name}/decision", {"approve": True}), 404)
    User.objects.filter(pk=bob.pk).update(is_staff=True)
    answer = program_of(User.objects.get(pk=bob.pk)).ask(
        "post", f"bookings/{name}/decision", {"approve": True}
    )
    assert answer.json()["state"] == "approved"


# --- whose it is -----------------------------------------------------------------------------------------


def test_what_is_anothers_does_not_exist_for_me(
    program: Program, bob: User, alice: User, broker: FakeBroker, booked: None
) -> None:
    booking = program.ask("post", "bookings", proposed()).json()["name"]
    Session.objects.create(name="sabcdefgh", owner=alice, options=OPTIONS | {"title": ""})
    Job.store([broker.put(make_job(7, kind="batch", name="secret-name"))])
    broker.logs[7] = b"secret text"
    thief = program_of(bob)
    before = len(broker.requests)
    for method, path, body in [
        ("get", "sessions/sabcdefgh", None),
        ("delete", "sessions/sabcdefgh", None),
        ("post", "sessions/sabcdefgh/extend", {"minutes": 5}),
        ("get", "jobs/7", None),
        ("delete", "jobs/7", None),
        ("get", "jobs/7/log", None),
        ("get", "jobs/7/result", None),
        ("get", "jobs/7/recipe", None),
        ("post", "jobs/7/extend", {"minutes": 5}),
        ("post", "jobs/7/resubmit", None),
        ("get", f"bookings/{booking}", None),
        ("patch", f"bookings/{booking}", {"minutes": 5}),
        ("delete", f"bookings/{booking}", None),
    ]:
        answer = thief.ask(method, path, body)
        problem(answer, 404)
        assert b"secret" not in answer.content
    assert {getattr(request, "user", "bob") for request in broker.requests[before:]} <= {"bob"}
    for path in ("sessions", "jobs", "bookings"):
        assert thief.ask("get", path).json()["items"] == []
    assert Session.objects.get().state == "requested" and booking in broker.reservations
    assert (
        problem(thief.ask("post", "jobs", {"command": ["true"], "reservation": booking}), 422)["field"]
        == "reservation"
    )


# --- the document ----------------------------------------------------------------------------------------


def test_the_document_names_every_address_and_its_refusals(db: None) -> None:
    document = Program("").get("/api/v1/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "/api/v1/jobs/{job_id}/log" in document["paths"]
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["security"] and operation["description"]
            refusals = {status: text for status, text in operation["responses"].items() if int(status) >= 400}
            assert {"401", "403", "422", "429", "503"} <= set(refusals)
            for text in refusals.values():
                assert list(text["content"]) == ["application/problem+json"]
