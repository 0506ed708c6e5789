"""Whatever is sent to the API, by whom ever: no failure of ours, and nothing of somebody else's.

schemathesis makes requests out of our own document, right and wrong ones, half of them about what is another
user's. `CARME_API_EXAMPLES=500 pytest tests/unit/webui/test_api_fuzz.py` takes its time.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, connection, transaction
from django.utils import timezone
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from carme_webui.accounts.models import User
from carme_webui.api.models import SCOPES, Token
from carme_webui.bookings.models import Booking
from carme_webui.jobs.models import Job
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import notify
from carme_webui.projects.models import Invitation, Membership, Project
from carme_webui.sessions.models import Preset, Session

from .conftest import program_of
from .fake_broker import NOW, FakeBroker, make_job

EXAMPLES = int(os.environ.get("CARME_API_EXAMPLES", "4"))  # of each operation, right and wrong
MARK = "zq-secret-of-carol"
HERS: dict[str, list[Any]] = {
    "name": ["scarolxyz", "carme-0123456789ab", "vision", "carol"],
    "job_id": [7],
    "user": ["carol"],
}
#: How statements begin that change no row.
READING = ("SELECT", "SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
#: Where administrators see and change objects of other users.
OF_ADMINS = tuple(f"/api/v1/{part}" for part in ("admin", "bookings", "projects", "news", "maintenance"))


@pytest.fixture
def carol(
    db: None, broker: FakeBroker, settings: Any, resume_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> User:
    """Somebody with one of everything."""
    site = settings.SITE
    settings.SITE = site.model_copy(
        update={
            "bookings": site.bookings.model_copy(update={"enabled": True}),
            "sessions": site.sessions.model_copy(update={"bind": []}),
            "portal": site.portal.model_copy(update={"requests_per_minute": 10**6}),
        }
    )
    carol = User.objects.create_user("carol", email=f"{MARK}@example.org")
    Session.objects.create(
        name="scarolxyz", owner=carol, options={"image": "torch", "minutes": 5, "title": MARK}, state="ready"
    )
    Job.store([broker.put(make_job(7, user="carol", name=MARK, kind="batch", node_list=MARK))])
    broker.logs[7] = MARK.encode()
    broker.results[7] = MARK.encode()
    Booking.objects.create(
        name="carme-0123456789ab", owner=carol, title=MARK, partition="gpu", gpu_type="a100", gpus_per_node=4,
        node_names=["n1"], start=NOW.replace(year=2099), end=NOW.replace(year=2100), state="requested",
    )  # fmt: skip
    project = Project.objects.create(name="vision", title=MARK)
    Membership.objects.create(project=project, user=carol, manager=True)
    Invitation.objects.create(project=project, user=User.objects.create_user("dave"), by=carol)
    Preset.objects.create(owner=carol, name=MARK, options={"image": "torch", "minutes": 5})
    notify(carol, MARK)
    broker.home.mkdir()
    monkeypatch.setitem(HERS, "number", [Preset.objects.get().pk, Invitation.objects.get().pk])
    return carol


@pytest.fixture(autouse=True)
def _one_connection() -> Iterator[None]:
    """Requests do not close the connection, whose transaction is the test's, as with Django's own client."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


def hers(carol: User) -> list[Any]:
    """All that is Carol's, as it is in the database."""
    rows = [
        Session.objects.filter(owner=carol),
        Job.objects.filter(user="carol"),
        Booking.objects.filter(owner=carol),
        Preset.objects.filter(owner=carol),
        Notice.objects.filter(user=carol),
        Project.objects.filter(name="vision"),
        Membership.objects.filter(project__name="vision"),
        Invitation.objects.filter(project__name="vision"),
        User.objects.filter(pk=carol.pk),
    ]
    return [list(kind.values()) for kind in [*rows, Token.objects.filter(owner=carol)]]


@contextlib.contextmanager
def changing() -> Iterator[list[str]]:
    """Collect the statements that may change the database; yields the list of them."""
    found: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        if not sql.lstrip().upper().startswith(READING):
            found.append(sql)
        return execute(sql, *arguments)

    with connection.execute_wrapper(note):
        yield found


def operations() -> Iterator[Any]:
    schema = schemathesis.openapi.from_wsgi(
        "/api/v1/openapi.json", get_wsgi_application(), headers={"Host": "testserver"}
    )
    for found in schema.get_all_operations():
        yield found.ok()  # pyright: ignore[reportAttributeAccessIssue]  a wrong document fails here


@functools.cache
def requests() -> list[tuple[Any, dict[str, int]]]:
    """All requests, each with the variable parts of its address that are to be hers, and which of hers.

    Every role sends the same ones: making them takes longer than sending them.
    """
    created: list[tuple[Any, dict[str, int]]] = []
    for operation in operations():

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
        )
        @hypothesis.given(
            case=st.one_of(
                operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE),
                operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
            ),
            about=st.data(),
        )
        def make(case: Any, about: Any) -> None:
            names = [name for name in case.path_parameters or {} if name in (*HERS, "number")]
            places = {name: about.draw(st.none() | st.integers(0, 3)) for name in sorted(names)}
            created.append((case, {name: place for name, place in places.items() if place is not None}))

        make()
    return created


def about_her(case: Any, places: dict[str, int]) -> Any:
    """A copy of a request with the identifiers of Carol's objects in its address."""
    copied = case.derive()
    for name, place in places.items():
        copied.path_parameters[name] = HERS[name][place % len(HERS[name])]
    return copied


@pytest.mark.parametrize("role", ["anonymous", "member", "manager", "admin"])
def test_nothing_fails_and_nothing_leaks(role: str, carol: User, broker: FakeBroker, alice: User) -> None:
    # Administrators see and change objects of other users in the administration, and nowhere else.
    manages = role == "admin"
    User.objects.filter(pk=alice.pk).update(is_staff=manages, is_superuser=manages)
    if role == "manager":
        own_project = Project.objects.create(name="mine", title="Mine")
        Membership.objects.create(project=own_project, user=alice, manager=True)
    headers = {"Host": "testserver"}
    if role != "anonymous":
        program = program_of(User.objects.get(pk=alice.pk), *SCOPES)
        headers["Authorization"] = program.defaults["HTTP_AUTHORIZATION"]
        # Else each request, undone as it is, would be the first that notes its use.
        Token.objects.filter(owner=alice).update(used=timezone.now())
    before, sent_before = hers(carol), len(broker.requests)
    answered: set[int] = set()

    for value, places in requests():
        case = about_her(value, places)
        with transaction.atomic():  # whatever it did is undone, so that the next one meets the same
            with changing() as statements:
                answer = case.call(headers=headers)
            answered.add(answer.status_code)
            # Most requests only read.
            after = hers(carol) if statements else before
            transaction.set_rollback(True)
        reported = (
            f"{case.method} {case.formatted_path} {case.body!r}: {answer.status_code} {answer.text[:300]}"
        )
        assert answer.status_code < 500 or answer.status_code == 503, reported
        if role == "anonymous":
            assert answer.status_code in (401, 404, 405), reported
        if not (manages and case.path.startswith(OF_ADMINS)):
            assert MARK not in answer.text, reported
            assert after == before, reported
        if answer.status_code not in (404, 405):
            case.validate_response(answer, checks=[status_code_conformance, content_type_conformance])
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == ["application/problem+json"], reported

    assert hers(carol) == before
    if not manages:
        users = {getattr(request, "user", None) for request in broker.requests[sent_before:]}
        assert users <= {None, "alice"}
    assert answered >= ({401} if role == "anonymous" else {200, 404, 422}), "something was really asked"
