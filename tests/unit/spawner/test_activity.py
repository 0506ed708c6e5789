"""What running servers report to the hub, and what the hub makes of it."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from carme.errors import CarmeError, InvalidRequest
from carme.jobs import JobState
from carme.sessions import Ending, Mark, ServerStatus, SessionState, Step
from carme_spawner import notes, orphan_cleanup, spawner, waiting
from carme_spawner.spawner import CarmeSpawner
from patience import HANG

from .conftest import Site, eventually


@pytest.fixture
async def running(site: Site) -> Site:
    """A site in which ada's session s1 is ready."""
    await site.start()
    await eventually(site.is_ready, "the server is ready")
    return site


def activity(**changes: Any) -> dict[str, Any]:
    """A report that nothing was in use for hours."""
    long_ago = time.time() - 10_000
    idle = {"busy_since_last": False, "kernels": long_ago, "terminals": long_ago, "gpus": None, "ranks": None}
    return {**idle, **changes}


def own(site: Site) -> CarmeSpawner:
    assert site.hub
    return next(user for user in site.hub.users.values() if user.name == "ada").spawners["s1"]


def with_policy(site: Site, **rules: Any) -> None:
    """From now on these rules hold for sessions."""
    changed = site.settings.sessions.model_copy(update=rules)
    own(site).settings = site.settings.model_copy(update={"sessions": changed})


async def test_the_broker_is_notified_of_each_step(running: Site) -> None:
    await eventually(
        lambda: running.broker.session(100).state is SessionState.READY, "the broker knows that it is ready"
    )
    session = running.broker.session(100)
    times = [session.at(step) for step in (Step.PROLOG, Step.CONTAINER, Step.LISTENING, Step.ROUTED)]
    assert None not in times
    assert times == sorted(times)  # pyright: ignore[reportArgumentType]
    assert session.at(Step.FIRST_PAGE) is None
    response = await running.report(100, "activity", json=activity(first_page=time.time()))
    assert response.status_code == 200
    await eventually(lambda: running.broker.session(100).at(Step.FIRST_PAGE), "the first page is noted")


async def test_a_server_gets_the_time_of_its_end(running: Site) -> None:
    with_policy(running, idle_minutes=30, extend=False)
    answer = (await running.report(100, "activity", json=activity())).json()
    started = running.broker.jobs[100].started
    ends = answer.pop("ends")
    assert started and ends == (started + timedelta(minutes=60)).isoformat()
    first, second = answer.pop("warned")
    assert first < second < ends
    unknown = {"stops_idle": None, "warned_idle": []}
    assert answer == unknown | {"idle_minutes": 30, "extend": False}


@pytest.mark.parametrize(("minutes", "left"), [(4, [1, 0.4]), (40, [10, 4]), (600, [15, 5])])
async def test_a_session_is_warned_of_its_end_by_the_share_of_its_time(
    running: Site, minutes: int, left: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = datetime(2026, 11, 20, 12, tzinfo=UTC)
    ends = start + timedelta(minutes=minutes)
    session = running.broker.session(100)
    marks = [Mark(step=Step.ALLOCATED, at=start)]
    known = session.model_copy(update={"ends": ends, "marks": marks})
    monkeypatch.setattr(own(running), "known_session", lambda: known)
    answer = (await running.report(100, "activity", json=activity())).json()
    warned = [ends - datetime.fromisoformat(moment) for moment in answer["warned"]]
    assert warned == [timedelta(minutes=minutes) for minutes in left]


WRONG: list[dict[str, Any]] = [
    {"more": 1},
    {"kernels": "now"},
    {"kernels": -1},
    {"terminals": 1e12},
    {"gpus": "NaN"},
    {"ranks": []},
    {"busy_since_last": 1},
    {"first_page": True},
]


async def test_other_reports_are_refused(running: Site) -> None:
    for change in WRONG:
        response = await running.report(100, "activity", json=activity(**change))
        assert response.status_code == 400, change
        assert next(iter(change)) in response.json()["message"]
    for minutes in (0, -5, 1.5, "60", None, 10**9):
        response = await running.report(100, "extend", json={"minutes": minutes})
        assert response.status_code == 400, minutes


async def test_only_the_server_itself_may_report(running: Site) -> None:
    await running.start("s1", "bob")
    for what, body in (("activity", activity()), ("extend", {"minutes": 5})):
        for server in (None, 101):
            response = await running.api(
                "POST", f"carme/{what}", token=running.token(100), server=server, json=body
            )
            assert response.status_code == 403


async def test_more_time_is_requested_from_the_broker(running: Site) -> None:
    response = await running.report(100, "extend", json={"minutes": 30})
    assert response.status_code == 200
    assert response.json()["minutes_limit"] == 90
    running.broker.refuse = InvalidRequest("A booking follows at 15:00.", "Ask for less.")
    response = await running.report(100, "extend", json={"minutes": 30})
    assert response.status_code == 400
    assert response.json() == {"message": "A booking follows at 15:00. Ask for less."}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The hub's clock, which stands still unless a test moves it."""
    now = [time.time()]
    monkeypatch.setattr(spawner, "time", lambda: now[0])
    return now


async def idle_for(site: Site, clock: list[float], minutes: int) -> None:
    """Let the server report that nothing is in use, as often as it does, for some minutes."""
    for _ in range(2 * minutes):
        clock[0] += 30
        await site.report(100, "activity", json=activity())


async def test_an_idle_session_is_warned_and_stopped(running: Site, clock: list[float]) -> None:
    with_policy(running, idle_minutes=5, idle_warning_minutes=2)
    await idle_for(running, clock, 4)
    assert (await running.report(100, "activity", json=activity())).json()["stops_idle"]
    await eventually(lambda: running.broker.session(100).stops_idle, "the broker knows")
    assert running.broker.session(100).idle_since
    await idle_for(running, clock, 3)
    await eventually(lambda: running.broker.session(100).is_over, "it is stopped")
    assert running.broker.session(100).ending is Ending.IDLE
    assert running.broker.reported_before_cancel is Ending.IDLE
    await eventually(lambda: "/jupyter/user/ada/s1/" not in running.routes, "the hub agrees")
    await eventually(lambda: not own_is_there(running), "the server is gone")


def own_is_there(site: Site) -> bool:
    assert site.hub
    user = next(user for user in site.hub.users.values() if user.name == "ada")
    return user.orm_spawners["s1"].server is not None


async def test_use_resets_the_warning(running: Site, clock: list[float]) -> None:
    with_policy(running, idle_minutes=5, idle_warning_minutes=2)
    await idle_for(running, clock, 4)
    await eventually(lambda: running.broker.session(100).stops_idle, "the broker knows")
    clock[0] += 30
    answer = await running.report(100, "activity", json=activity(gpus=clock[0]))
    assert answer.json()["stops_idle"] is None
    await eventually(lambda: running.broker.session(100).stops_idle is None, "the broker knows")
    assert running.broker.session(100).idle_since is None
    assert running.broker.cancelled == []


async def test_a_pause_of_the_hub_stops_nobody(running: Site, clock: list[float]) -> None:
    with_policy(running, idle_minutes=5, idle_warning_minutes=2)
    await idle_for(running, clock, 4)
    await running.down()
    clock[0] += 3600
    await running.up()
    await eventually(running.is_ready, "the server is there again")
    with_policy(running, idle_minutes=5, idle_warning_minutes=2)
    answer = await running.report(100, "activity", json=activity())
    assert answer.json()["stops_idle"] is None
    assert running.broker.cancelled == []
    # What the last hub had threatened is taken back.
    await eventually(lambda: running.broker.session(100).stops_idle is None, "the broker knows")


@pytest.fixture
async def thaw(running: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The server does not answer until this is called, which the broker knows."""
    frozen = running.broker.folder(100) / "frozen"
    frozen.touch()
    with monkeypatch.context() as impatient:
        impatient.setattr(spawner, "ANSWER", 0.2)
        await own(running).find_server()
    await eventually(lambda: running.broker.session(100).state is SessionState.LOST, "the broker knows")
    monkeypatch.setattr(spawner, "ANSWER", HANG)
    return frozen.unlink


async def test_a_server_that_does_not_answer_is_noted_and_found_again(
    running: Site, thaw: Callable[[], None]
) -> None:
    assert running.broker.cancelled == []
    thaw()
    await own(running).find_server()
    await eventually(lambda: running.broker.session(100).state is SessionState.READY, "the broker knows")


@pytest.mark.usefixtures("thaw")
async def test_a_report_says_that_a_server_is_there_again(running: Site) -> None:
    await running.report(100, "activity", json=activity())
    await eventually(lambda: running.broker.session(100).state is SessionState.READY, "the broker knows")


async def test_only_silent_servers_are_queried(running: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert running.hub
    assert list(running.hub.orphan_cleanup.silent()) == []
    monkeypatch.setattr(orphan_cleanup, "SILENCE", -1.0)
    assert list(running.hub.orphan_cleanup.silent()) == [own(running)]


async def test_a_suspended_server_is_not_queried_until_it_resumes(
    running: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running.hub
    monkeypatch.setattr(orphan_cleanup, "SILENCE", -1.0)
    silent = running.hub.orphan_cleanup.silent
    await running.broker.change(100, state=JobState.SUSPENDED)
    assert running.broker.session(100).state is SessionState.SUSPENDED
    await eventually(lambda: not list(silent()), "nobody looks for it")
    await running.broker.change(100, state=JobState.RUNNING)
    await eventually(lambda: list(silent()) == [own(running)], "it is looked for")
    await eventually(lambda: running.broker.session(100).state is SessionState.READY, "it is ready")
    assert running.broker.cancelled == []


async def test_a_restarting_hub_keeps_servers_that_do_not_answer(
    running: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawner, "ANSWER", 0.2)
    monkeypatch.setattr(orphan_cleanup, "SILENCE", -1.0)
    await running.down()
    (running.broker.folder(100) / "frozen").touch()
    await running.up()
    await eventually(lambda: running.broker.session(100).state is SessionState.LOST, "the broker knows")
    assert running.broker.cancelled == []
    assert await running.is_ready()


async def test_a_server_that_is_there_again_after_a_restart_of_the_hub_is_found(
    running: Site, thaw: Callable[[], None]
) -> None:
    await running.down()
    thaw()
    await running.up()
    await eventually(lambda: running.broker.session(100).state is SessionState.READY, "the broker knows")


async def test_a_job_that_ends_while_its_server_is_queried_ends_no_watch(
    running: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running.hub
    await running.start("s2")
    await eventually(lambda: running.is_ready("s2"), "the second server is ready")
    monkeypatch.setattr(orphan_cleanup, "SILENCE", -1.0)
    monkeypatch.setattr(spawner, "ANSWER", HANG)
    for job_id in (100, 101):
        (running.broker.folder(job_id) / "frozen").touch()
    care = running.hub.orphan_cleanup
    monkeypatch.setattr(care, "_places", asyncio.Semaphore(1))
    round_ = asyncio.create_task(care.round())
    await eventually(care._places.locked, "one of the two is looked for, and the other waits")
    await running.broker.finish(101, JobState.NODE_FAIL)
    await eventually(lambda: "/jupyter/user/ada/s2/" not in running.routes, "the end is noticed")
    assert not round_.done()
    (running.broker.folder(100) / "frozen").unlink()
    await round_


async def test_a_round_that_fails_is_not_the_last(running: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert running.hub
    care, rounds = running.hub.orphan_cleanup, []

    async def fail() -> None:
        rounds.append(1)
        raise RuntimeError

    monkeypatch.setattr(care, "round", fail)
    monkeypatch.setattr(orphan_cleanup, "ROUND", 0.01)
    watching = asyncio.create_task(care.watch())
    await eventually(lambda: len(rounds) > 1, "another round")
    watching.cancel()


async def test_the_reason_of_a_stop_is_reported_before_the_job_is_cancelled(running: Site) -> None:
    await running.api("DELETE", "users/ada/servers/s1")
    await eventually(lambda: running.broker.session(100).is_over, "the job is over")
    assert running.broker.session(100).ending is Ending.STOPPED
    assert running.broker.reported_before_cancel is Ending.STOPPED
    await eventually(
        lambda: running.broker.notes[-1][1].server is ServerStatus.GONE, "the broker knows that it is gone"
    )


async def test_notes_wait_for_a_broker_that_is_away_and_keep_their_order(site: Site) -> None:
    site.broker.command = ["sleep", "600"]
    await site.start()
    await site.runs()
    await site.broker.close()
    started = await site.report(100, "ready", json={"port": 40123, "host": "127.0.0.1", "pid": 7})
    assert started.status_code == 204
    own(site).note(idle_since=notes.moment(5.0))
    own(site).note(idle_since=notes.moment(6.0))
    await asyncio.sleep(0.3)
    assert site.broker.notes == [] or site.broker.notes[-1][1].idle_since is None
    await site.broker.open()
    await eventually(
        lambda: (
            [note.idle_since for _, note in site.broker.notes if note.idle_since]
            == [notes.moment(5.0), notes.moment(6.0)]
        ),
        "the broker has heard of it",
    )


async def test_a_job_that_ends_is_noted_as_gone_without_an_ending(running: Site) -> None:
    await running.broker.finish(100, JobState.TIMEOUT)
    await eventually(
        lambda: running.broker.notes[-1][1].server is ServerStatus.GONE, "the broker knows that it is gone"
    )
    assert running.broker.session(100).ending is Ending.TIME_LIMIT


async def test_a_stop_is_tried_again_while_the_broker_has_too_much_to_do(running: Site) -> None:
    running.broker.refuse_once = CarmeError("Too many requests.", code="busy")
    await running.api("DELETE", "users/ada/servers/s1")
    await eventually(lambda: running.broker.cancelled == [100], "the job is cancelled")
    assert running.broker.refuse_once is None


async def test_a_server_that_does_not_report_is_reported_as_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LONGEST_START", timedelta(seconds=0.2))
    site.broker.command = ["sleep", "600"]
    await site.start()
    await eventually(lambda: site.broker.session(100).state is SessionState.LOST, "the broker knows")
    assert "has not reported" in site.broker.session(100).sentence
    assert site.broker.cancelled == []


async def test_a_server_whose_job_still_copies_data_is_not_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LONGEST_START", timedelta(0))
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(CarmeSpawner, "note", lambda _, **what: noted.append(what))
    site.broker.command = ["sleep", "600"]
    await site.start(image="torch", minutes=60, stage=[{"source": "/data/images", "target": "ram"}])
    await site.runs()
    polls = 0

    async def silence(spawner: CarmeSpawner, changed: asyncio.Event) -> None:
        nonlocal polls
        job = spawner.watcher.find(100)
        polls += bool(job and job.started)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(CarmeSpawner, "silence", silence)
    await eventually(lambda: polls > 5, "the hub has looked at the job that runs")
    assert {"server": ServerStatus.UNREACHABLE} not in noted
