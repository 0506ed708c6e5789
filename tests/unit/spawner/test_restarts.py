"""Sessions outlive the hub."""

import asyncio
import logging
import sys
from datetime import UTC, datetime, timedelta
from unittest.mock import patch

import httpx
import pytest

from carme.broker import server as server_module
from carme.broker.service import Broker
from carme.config import Settings
from carme.errors import CarmeError
from carme.jobs import JobState
from carme.sessions import Ending, SessionState
from carme.slurm import UnixAccount
from carme_spawner import orphan_cleanup, waiting
from carme_spawner.watcher import JobWatcher
from patience import HANG

from .conftest import TOKEN, Site, eventually
from .local_broker import FAKE_SESSION, LocalBroker


async def test_a_running_session_is_found_again(site: Site) -> None:
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    target = site.routes["/jupyter/user/ada/s1/"]["target"]
    await site.down()
    await site.up()
    await eventually(site.is_ready, "the server is ready again")
    assert site.routes["/jupyter/user/ada/s1/"]["target"] == target
    token = site.token(100)
    await site.api("DELETE", "users/ada/servers/s1")
    await eventually(lambda: site.broker.jobs[100].is_over, "the new hub can stop it")
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "the route is gone")
    assert (await site.api("GET", "user", token=token)).status_code == 403


async def test_a_session_that_ended_meanwhile_is_noticed(site: Site) -> None:
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    await site.down()
    await site.broker.finish(100, JobState.NODE_FAIL)
    await site.up()
    assert await site.server() is None


async def test_a_queued_session_goes_on_waiting(site: Site) -> None:
    site.broker.command = None
    assert (await site.start()).status_code == 202
    await site.down()
    await site.up()
    server = await site.server()
    assert server and server["pending"] == "spawn"
    assert site.broker.cancelled == []
    await site.broker.run(100, FAKE_SESSION)
    await eventually(site.is_ready, "the server is ready")
    assert "/jupyter/user/ada/s1/" in site.routes
    await site.broker.finish(100, JobState.TIMEOUT)
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "its end is noticed")


async def test_a_queued_session_becomes_ready_after_a_restart_though_the_proxy_is_away(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.broker.command = None
    await site.start()
    await site.down()
    await site.up()
    assert site.hub
    tried = asyncio.Event()

    async def refuse(*_: object) -> None:
        tried.set()
        raise ConnectionError("the proxy is away")

    with monkeypatch.context() as patched:
        patched.setattr(site.hub.proxy, "add_user", refuse)
        await site.broker.run(100, FAKE_SESSION)
        await asyncio.wait_for(tried.wait(), HANG)
        await eventually(site.is_ready, "the server is ready")
    assert "/jupyter/user/ada/s1/" not in site.routes
    await site.hub.update_last_activity()
    assert "/jupyter/user/ada/s1/" in site.routes
    await site.broker.finish(100, JobState.TIMEOUT)
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "its end is noticed")


async def test_a_queued_session_can_be_given_up_after_a_restart(site: Site) -> None:
    site.broker.command = None
    await site.start()
    await site.down()
    await site.up()
    assert (await site.api("DELETE", "users/ada/servers/s1")).status_code in (202, 204)
    await eventually(lambda: site.broker.cancelled == [100], "the job is cancelled")
    assert await site.server() is None


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_session_that_waits_too_long_is_given_up_with_the_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    site.broker.command = None
    await site.start()
    if is_restarted:
        await site.down()
    monkeypatch.setattr(waiting, "LONGEST_WAIT", timedelta(seconds=0.2))
    if is_restarted:
        await site.up()
    await eventually(lambda: site.broker.cancelled == [100], "the job is taken from the queue")
    await eventually(
        lambda: "waited in the queue" in site.broker.session(100).sentence, "the session's end has the reason"
    )
    assert "You stopped" not in site.broker.session(100).sentence

    async def is_given_up() -> bool:
        return await site.server() is None

    await eventually(is_given_up, "the server is given up")


async def test_a_queued_session_that_dies_after_a_restart_says_why(site: Site) -> None:
    site.broker.command = None
    await site.start()
    await site.down()
    await site.up()
    await site.broker.run(100, [sys.executable, "-c", "raise SystemExit('disk full')"])
    assert "exit code 1" in (await site.events())[-1]["message"]
    await eventually(
        lambda: "disk full" in site.broker.session(100).sentence, "the broker has read the end of the log"
    )
    assert await site.server() is None


async def test_the_next_hub_finds_a_job_whose_submission_it_did_not_see(site: Site) -> None:
    site.broker.command = None
    site.broker.answering.clear()
    starting = asyncio.create_task(site.start())
    await eventually(lambda: 100 in site.broker.requests, "the job is submitted")
    await starting
    await site.down()
    await site.up()
    server = await site.server()
    assert server and server["pending"] == "spawn"
    await site.broker.run(100, FAKE_SESSION)
    await eventually(site.is_ready, "the server is ready")
    assert list(site.broker.jobs) == [100] and site.broker.cancelled == []


async def test_a_job_that_appears_after_the_hub_searched_for_it_gets_no_key_and_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.broker.command = None
    site.broker.answering.clear()
    starting = asyncio.create_task(site.start())
    await eventually(lambda: 100 in site.broker.requests, "the job is submitted")
    site.broker.unseen = {100}
    await starting
    await site.down()
    await site.up()
    assert await site.server() is None
    assert (await site.api("GET", "user", token=site.token(100))).status_code == 403
    # Its job does not go on without a session.
    assert site.hub
    await eventually(site.hub.orphan_cleanup.strays, "the hub notices it")
    monkeypatch.setattr(orphan_cleanup, "STRAY", 0.0)
    await site.hub.orphan_cleanup.round()
    await eventually(lambda: site.broker.cancelled == [100], "it is cancelled")


@pytest.mark.parametrize("has_users", [False, True])
async def test_a_hub_with_an_empty_database_leaves_the_sessions_of_another_one(
    site: Site, monkeypatch: pytest.MonkeyPatch, has_users: bool
) -> None:
    """As on a new head before its backup is restored."""
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    await site.broker.change(100, submitted=datetime.now(UTC) - timedelta(minutes=1))
    await site.down()
    for file in site.broker.socket.parent.glob("hub.sqlite*"):
        file.unlink()
    await site.up()
    assert site.hub
    if has_users:
        await site.api("POST", "users/bob")
    watcher = site.hub.orphan_cleanup._watcher
    await eventually(lambda: watcher.session(100) and watcher.find(100), "the hub has heard of the session")
    monkeypatch.setattr(orphan_cleanup, "STRAY", 0.0)
    await site.hub.orphan_cleanup.round()
    assert site.hub.orphan_cleanup.strays() == [] and site.broker.cancelled == []


async def test_a_broker_that_cannot_start_leaves_no_replacements(settings: Settings) -> None:
    before = UnixAccount.__dict__["named"], server_module.identify
    broker = LocalBroker(settings)
    with (
        patch.object(Broker, "prepare", side_effect=CarmeError("The audit log cannot be written.")),
        pytest.raises(CarmeError),
    ):
        await broker.open()
    assert (UnixAccount.__dict__["named"], server_module.identify) == before


async def test_a_hub_that_is_ended_answers_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.broker.answering.clear()
    await site.api("POST", "users/ada")
    cut_off = []

    async def end(*_: object) -> None:
        cut_off.append(not starting.done())

    monkeypatch.setattr("jupyterhub.app.JupyterHub.shutdown_cancel_tasks", end)
    address = f"{site.settings.hub.listen}{site.settings.hub.base_path}hub/api/"
    headers = {"Authorization": f"token {TOKEN}"}
    async with httpx.AsyncClient(
        base_url=address, headers=headers, verify=site.proxys_certificate()
    ) as proxy:
        assert (await proxy.get("users/ada")).status_code == 200
        starting = asyncio.create_task(site.api("POST", "users/ada/servers/s1", json={"image": "torch"}))
        await eventually(lambda: site.broker.requests, "the start has been taken")
        assert site.hub
        ending = asyncio.create_task(site.hub.shutdown_cancel_tasks())
        await asyncio.sleep(0)
        # What comes now is not begun, also on a connection that is open already.
        late = await proxy.post("users/ada/servers/s2", json={})
    assert (late.status_code, late.content) == (503, b"")
    await ending
    assert cut_off == [False] and (await starting).status_code == 202
    site.broker.answering.set()
    await site.down()
    assert len(site.broker.requests) == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_session_whose_job_got_another_number_goes_on(site: Site, restarted: bool) -> None:
    site.broker.command = None
    await site.start()
    if restarted:
        await site.down()
    await site.broker.lose(100, 107)
    if restarted:
        await site.up()
    await site.broker.run(107, FAKE_SESSION)
    await eventually(site.is_ready, "the server is ready")
    await site.api("DELETE", "users/ada/servers/s1")
    await eventually(lambda: site.broker.cancelled == [107], "the job is cancelled")


async def test_a_session_whose_number_is_another_jobs_ends_and_leaves_that_alone(site: Site) -> None:
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    later = datetime.now(UTC) + timedelta(minutes=1)
    await site.broker.change(100, key=None, kind="other", name="train", submitted=later)
    await eventually(lambda: "/jupyter/user/ada/s1/" not in site.routes, "its end is noticed")
    assert {session for _, session in site.broker.meant} == {"s1"}


@pytest.mark.parametrize("report", ["before", "after"])
async def test_a_session_that_slurm_put_back_into_the_queue_ends(site: Site, report: str) -> None:
    site.broker.hearing.clear()
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    if report == "before":
        site.broker.hearing.set()
        await eventually(
            lambda: site.broker.session(100).state is SessionState.READY, "the broker has heard of it"
        )
    await site.broker.change(100, state=JobState.PENDING, node_list="", started=None)
    site.broker.hearing.set()
    await eventually(lambda: site.broker.session(100).is_over, "the job is cancelled")
    assert site.broker.cancelled == [100]
    session = site.broker.session(100)
    assert (session.ending, "put it back" in session.sentence) == (Ending.LOST, True)


async def test_a_hub_that_ends_between_report_and_route_opens_the_route_later(site: Site) -> None:
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    assert site.hub
    spawner = next(user for user in site.hub.users.values() if user.name == "ada").spawners["s1"]
    spawner.routed = False
    spawner.save_state()
    await site.down()
    target = site.routes.pop("/jupyter/user/ada/s1/")["target"]
    await site.up()
    await eventually(site.is_ready, "the server is ready")
    assert site.routes["/jupyter/user/ada/s1/"]["target"] == target


async def test_a_note_that_ends_with_the_hub_is_reported_by_the_next(site: Site) -> None:
    site.broker.hearing.clear()
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    await site.down()
    site.broker.hearing.set()
    assert site.broker.session(100).state is SessionState.STARTING
    await site.up()
    await eventually(lambda: site.broker.session(100).state is SessionState.READY, "the broker knows")


async def test_a_broker_that_answers_before_its_first_poll_loses_no_start(site: Site) -> None:
    site.broker.dies = "after"
    site.broker.blind = 2
    assert (await site.start()).status_code in (201, 202)
    await eventually(site.is_ready, "the server is ready")
    assert (list(site.broker.jobs), site.broker.blind) == ([100], 0)


async def test_a_session_that_the_hub_knows_is_no_stray(site: Site) -> None:
    site.broker.command = None
    await site.start("s0", "bob")
    site.broker.command = FAKE_SESSION
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    for _ in range(2):
        assert site.hub
        assert site.hub.orphan_cleanup.strays() == []
        await site.down()
        await site.up()


@pytest.mark.parametrize("dies", ["before", "after"])
async def test_a_broker_that_ends_during_a_submission_costs_no_session_and_no_second_job(
    site: Site, dies: str
) -> None:
    site.broker.dies = dies
    assert (await site.start()).status_code in (201, 202)
    await eventually(site.is_ready, "the server is ready")
    assert list(site.broker.jobs) == [100]


async def test_a_broker_that_takes_too_long_gets_no_second_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.broker.command = None
    site.broker.answering.clear()
    broker = JobWatcher.shared(str(site.broker.socket), logging.getLogger()).broker
    monkeypatch.setattr(broker, "timeout", 0.2)
    assert (await site.start()).status_code in (202, 503)

    async def given_up() -> bool:
        return await site.server() is None

    await eventually(given_up, "the start has failed")
    site.broker.answering.set()
    assert list(site.broker.jobs) == [100]
