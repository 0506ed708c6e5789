"""A session's life, as the portal sees it through JupyterHub's API."""

import asyncio
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import carme_spawner.hub_config as hub_config
from carme.errors import BrokerUnavailable, InvalidRequest
from carme.jobs import JobState
from carme.sessions import STATES, SessionState
from carme.translation import message
from carme.translation.markup import message_in

from .conftest import NO_GPU, Site, eventually


async def test_a_session_becomes_ready_and_stops(site: Site) -> None:
    response = await site.start(image="torch", minutes=90, gpus_per_node=2, title="Experiment")
    assert response.status_code in (201, 202), response.text
    await eventually(site.is_ready, "the server is ready")

    submitted = site.broker.requests[100]
    assert submitted.user == "ada"
    request = submitted.request
    assert (request.name, request.kind, request.command) == ("session-s1", "session", ["carme-singleuser"])
    assert (request.image, request.minutes, request.gpus_per_node) == ("torch", 90, 2)
    assert request.environment["JUPYTERHUB_USER"] == "ada"
    assert not {"PATH", "HOME", "JUPYTERHUB_SERVICE_URL"} & request.environment.keys()
    assert not [name for name in request.environment if name.startswith("JUPYTERHUB_SSL")]
    assert site.routes["/jupyter/user/ada/s1/"]["target"].startswith("https://127-0-0-1.")
    assert (await site.visit("/api"))[0] == 200

    response = await site.api("DELETE", "users/ada/servers/s1", json={"remove": True})
    assert response.status_code in (202, 204)
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "the route is gone")
    assert site.broker.jobs[100].state == JobState.CANCELLED
    assert await site.server() is None


async def test_the_default_server_gets_the_sites_defaults(site: Site) -> None:
    await site.api("POST", "users/ada")
    await site.api("POST", "users/ada/server")
    await eventually(lambda: 100 in site.broker.requests, "the job is submitted")
    request = site.broker.requests[100].request
    assert (request.name, request.image, request.minutes) == ("session-default", "torch", 60)


async def test_a_job_that_ends_takes_its_server_along(site: Site) -> None:
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    token = site.token(100)
    await site.broker.finish(100, JobState.TIMEOUT)
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "the route is gone")
    assert await site.server() is None
    assert site.broker.cancelled == []
    # Its key to the hub is void.
    assert (await site.api("GET", "user", token=token)).status_code == 403


async def test_a_refused_request_is_answered_with_the_brokers_sentence(site: Site) -> None:
    site.wait_for_outcome()
    site.broker.refuse = NO_GPU
    response = await site.start(image="torch", minutes=60, gpus_per_node=9)
    assert response.status_code == 400
    assert response.json()["message"] == str(NO_GPU)
    # A page that asks later gets the same answer.
    assert (await site.events())[-1]["message"] == f"Spawn failed: {NO_GPU}"


async def test_the_portal_gets_the_template_of_a_refusal(site: Site) -> None:
    site.wait_for_outcome()
    template = "There is no partition {name!r}; there are: {known}."
    site.broker.refuse = InvalidRequest(message(template, name="<gpu>", known="cpu"))
    await site.start(image="torch", minutes=60, gpus_per_node=9)
    event = (await site.events())[-1]
    assert "<gpu>" not in event["html_message"]
    found = message_in(event["html_message"])
    assert found is not None and found.in_language("de") == "Es gibt keine Partition '<gpu>'; es gibt: cpu."


async def test_options_that_do_not_exist_are_named(site: Site) -> None:
    site.wait_for_outcome()
    response = await site.start(image="torch", minutes=60, gpu=1)
    assert response.status_code == 400
    assert "'gpu'" in response.json()["message"]
    assert site.broker.requests == {}


async def test_options_of_the_wrong_type_are_named(site: Site) -> None:
    site.wait_for_outcome()
    response = await site.start(image="torch", minutes="soon; rm -rf /")
    assert response.status_code == 400
    assert "minutes" in response.json()["message"]


async def test_a_job_that_dies_at_its_start_says_why_and_what_it_wrote_last(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.wait_for_outcome()
    lines = "".join(f"line {number}\n" for number in range(1000)) + "no such <i>library</i>: libfoo"
    site.broker.command = [sys.executable, "-c", f"print({lines!r}); raise SystemExit(3)"]
    response = await site.start()
    text = response.json()["message"]
    assert response.status_code == 502
    assert text.startswith(f"{site.broker.session(100).label}. ") and "exit code 3" in text
    assert text.endswith("line 999\nno such <i>library</i>: libfoo") and "line 900\n" not in text
    failed = (await site.events())[-1]
    assert text in failed["message"]
    assert "no such &lt;i&gt;library&lt;/i&gt;: libfoo</span>" in failed["html_message"]
    assert "<i>" not in failed["html_message"] and "white-space: pre-wrap" in failed["html_message"]
    assert message_in(failed["html_message"]) == text
    assert await site.server() is None
    # The hub's journal has the cause; what the job wrote is its owner's.
    assert "exit code 3" in caplog.text
    assert "line 999" not in caplog.text and "libfoo" not in caplog.text


async def test_a_job_that_dies_and_wrote_nothing_is_reported_at_once(site: Site) -> None:
    site.wait_for_outcome()
    site.broker.command = [sys.executable, "-c", "raise SystemExit(3)"]
    text = (await site.start()).json()["message"]
    assert "exit code 3" in text and "log says" not in text
    assert not site.broker.session(100).log_pending


async def test_a_start_that_failed_is_reported_though_its_log_cannot_be_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme_spawner.spawner.LAST_REPORT", 0.5)
    site.wait_for_outcome()
    requested = asyncio.Event()

    async def hangs(*_: object) -> str:
        requested.set()
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr("carme.broker.files.JobFiles.log_tail", hangs)  # as a home that does not answer
    site.broker.command = [sys.executable, "-c", "raise SystemExit(3)"]
    assert "exit code 3" in (await site.start()).json()["message"] and requested.is_set()


async def test_without_a_broker_a_start_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carme_spawner.spawner.BROKERS_RETURN", 2)
    site.wait_for_outcome()
    await site.broker.close()
    response = await site.start()
    assert response.status_code == 503
    assert "broker" in response.json()["message"]


async def test_a_queued_session_says_so_and_can_be_given_up(site: Site) -> None:
    site.broker.command = None
    await site.start("s0", "bob")
    response = await site.start()
    assert response.status_code == 202
    received: list[dict[str, Any]] = []
    reading = asyncio.create_task(site.events(received))
    server = await site.server()
    assert server and server["pending"] == "spawn"
    await eventually(
        lambda: any("waits for" in event["message"] for event in received), "the page says that it waits"
    )
    assert (await site.api("DELETE", "users/ada/servers/s1")).status_code in (202, 204)
    await eventually(lambda: site.broker.cancelled == [101], "the job is cancelled")
    messages = [event["message"] for event in await reading]
    assert any(message.startswith(STATES[SessionState.QUEUED]) for message in messages), messages
    assert any("waits for" in message for message in messages)
    assert "cancelled" in messages[-1]
    assert await site.server() is None


async def test_a_broker_that_is_away_ends_no_session(site: Site) -> None:
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    await site.broker.close()
    assert await site.is_ready()
    await site.broker.open()
    await site.broker.finish(100, JobState.TIMEOUT)
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "the end is noticed after all")


async def test_a_stop_without_a_broker_is_made_up_for(site: Site) -> None:
    assert site.hub
    site.hub.tornado_application.settings["slow_stop_timeout"] = 0.3
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    await site.broker.close()
    response = await site.api("DELETE", "users/ada/servers/s1")
    assert response.status_code == 202
    assert site.broker.jobs[100].is_active
    await site.broker.open()
    await eventually(lambda: site.broker.jobs[100].is_over, "the job is cancelled once the broker is back")
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "the route is gone")


async def test_starts_are_not_limited_by_those_that_wait(site: Site) -> None:
    site.broker.command = None
    for number in range(3):
        assert (await site.start(f"s{number}")).status_code == 202
    assert len(site.broker.jobs) == 3


def test_the_broker_being_away_is_no_fault_of_the_request() -> None:
    from carme_spawner.spawn_progress import refusal

    assert refusal(BrokerUnavailable("No.", "Wait.")).status_code == 503
    assert refusal(BrokerUnavailable("100 % gone.", "Wait.")).message == "100 % gone. Wait."


async def test_only_servers_that_exist_count_for_the_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_config, "SERVERS_PER_USER", 1)
    await site.start("s1")
    await eventually(site.is_ready, "the server is ready")
    response = await site.start("s2")
    assert response.status_code == 400
    assert "maximum of 1" in response.json()["message"]
    await site.broker.finish(100, JobState.TIMEOUT)
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "the first one has ended")
    await eventually(lambda: not user(site).orm_spawners["s1"].server, "its record is closed")
    assert (await site.start("s2")).status_code in (201, 202)


async def test_servers_that_ended_long_ago_are_forgotten(site: Site) -> None:
    site.broker.command = None
    for name in ("old", "young"):
        await site.start(name)
        await site.api("DELETE", f"users/ada/servers/{name}")
    records = user(site).orm_spawners
    records["old"].last_activity = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=2)
    await site.start("new")
    assert set(user(site).orm_spawners) - {""} == {"young", "new"}


async def test_the_portal_signs_users_out_of_the_hub(site: Site) -> None:
    site.broker.command = None
    await site.start()
    ada = user(site)
    cookie, own = ada.cookie_id, ada.new_api_token()
    browser = ada.new_api_token(session_id="a-browser")
    assert (await site.api("DELETE", "carme/logins/ada", token=own)).status_code == 403
    assert (await site.api("GET", "user", token=browser)).status_code == 200
    assert (await site.api("DELETE", "carme/logins/ada")).status_code == 204
    assert ada.cookie_id != cookie
    assert (await site.api("GET", "user", token=browser)).status_code == 403
    for token in (own, site.token(100)):
        assert (await site.api("GET", "user", token=token)).status_code == 200
    assert (await site.api("DELETE", "carme/logins/nobody")).status_code == 404


async def test_a_user_who_signs_in_after_signing_out_stays_signed_in(site: Site) -> None:
    site.broker.command = None
    await site.start()
    ada = user(site)
    before, moment = ada.new_api_token(session_id="a-browser"), time.time()
    after = ada.new_api_token(session_id="another-browser")
    assert (await site.api("DELETE", "carme/logins/ada", json={"before": moment})).status_code == 204
    assert (await site.api("GET", "user", token=before)).status_code == 403
    assert (await site.api("GET", "user", token=after)).status_code == 200
    for wrong in ("now", [1], 1e300):
        response = await site.api("DELETE", "carme/logins/ada", json={"before": wrong})
        assert response.status_code == 400


async def test_the_token_of_a_session_reaches_nothing_but_its_own(site: Site) -> None:
    site.broker.command = None
    await site.start()
    response = await site.api("GET", "user", token=site.token(100))
    assert set(response.json()["scopes"]) == {
        "access:servers!server=ada/s1",
        "read:users:activity!user=ada",
        "read:users:groups!user=ada",
        "read:users:name!user=ada",
        "users:activity!user=ada",
    }
    for method, path in (
        ("GET", "users"),
        ("GET", "users/ada/tokens"),
        ("POST", "users/ada/tokens"),
        ("POST", "users/ada/servers/s2"),
        ("DELETE", "users/ada/servers/s1"),
        ("DELETE", "carme/logins/ada"),
    ):
        response = await site.api(method, path, token=site.token(100))
        assert response.status_code in (403, 404), (method, path)


def user(site: Site) -> Any:
    assert site.hub
    return next(user for user in site.hub.users.values() if user.name == "ada")


async def test_a_start_that_is_given_up_together_with_its_event_is_given_up(site: Site) -> None:
    await site.start()
    assert site.hub
    spawner: Any = next(iter(site.hub.users.values())).spawners["s1"]
    for steps in range(8):
        event = asyncio.Event()
        waiting = asyncio.create_task(spawner.silence(event))
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting
