"""What the broker leaves out where jobs are many, and that nobody sees it."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carme.broker import forecasts as forecasts_module
from carme.broker import waiting as waiting_module
from carme.broker.feed import Feed
from carme.broker.server import Server
from carme.broker.service import Broker
from carme.broker.waiting import Waiting
from carme.broker.watch import Watch
from carme.config import Settings
from carme.jobs import Cluster, Forecast, Job, JobState, Reservation
from carme.jobs.limits import Limits
from carme.sessions.start_estimates import Place, places
from carme.translation import moments, until_of
from patience import HANG


def job(number: int, **fields: Any) -> Job:
    known = {"id": number, "name": "a", "user": "ada", "partition": "gpu", "state": "PENDING"}
    return Job.model_validate(known | fields)


def counted(jobs: list[Job]) -> dict[int, Place]:
    """The places, by asking for each job which others are before it."""
    waiting = [each for each in jobs if each.is_pending and each.state is not JobState.CONFIGURING]
    found = {}
    for each in waiting:
        partitions = set(each.partition.split(","))
        rivals = [
            rival for rival in waiting if rival.priority and partitions & set(rival.partition.split(","))
        ]
        before = [
            rival for rival in rivals if (-(rival.priority or 0), rival.id) < (-(each.priority or 0), each.id)
        ]
        on_hold = each.priority == 0
        found[each.id] = Place(len(rivals if on_hold else before) + 1, len(rivals) + on_hold)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_places_are_those_that_counting_gives(seed: int) -> None:
    draw = random.Random(seed)
    jobs = [
        job(
            number,
            partition=draw.choice(("gpu", "cpu", "gpu,cpu", "long", "cpu,long")),
            priority=draw.randrange(4),
            state=draw.choice(("PENDING", "PENDING", "CONFIGURING", "RUNNING")),
        )
        for number in draw.sample(range(100), k=40)
    ]
    assert places(jobs) == counted(jobs)
    even = places(jobs, lambda each: each.id % 2 == 0)
    assert even == {number: place for number, place in counted(jobs).items() if number % 2 == 0}


async def test_clients_get_the_jobs_that_changed_after_a_number_in_that_order() -> None:
    class Slurm:
        has_many_jobs = False

    feed = Feed()
    watch = Watch(cast(Any, Slurm()), 1.0, feed, cast(Any, SimpleNamespace()))
    watch.remember([job(number, user=("ada", "bob")[number % 2]) for number in range(6)])
    since = feed.change
    for number in (4, 1, 2, 4):
        watch._put(job(number, user=("ada", "bob")[number % 2], reason=f"Change{feed.change}"), 1)
    assert [each.id for each in watch.after(since, None)] == [1, 2, 4]
    assert [each.id for each in watch.after(since, "ada")] == [2, 4]
    watch._drop(2)
    assert [each.id for each in watch.after(since, None)] == [1, 4]
    assert len(watch.after(0, None)) == 5 and watch.after(feed.change, None) == []


@pytest.mark.parametrize(("took", "searches"), [(0.01, 2), (10.0, 1)])
async def test_what_is_missing_is_searched_less_often_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, took: float, searches: int
) -> None:
    calls: list[list[int]] = []

    def timed(short: list[Job], *_: Any) -> tuple[dict[int, str], float]:
        calls.append([job.id for job in short])
        return {job.id: "1 GPU" for job in short}, took

    monkeypatch.setattr(waiting_module, "_timed", timed)
    details, cluster = (
        Waiting(cast(Any, SimpleNamespace(has_many_jobs=False))),
        Cluster(taken=datetime.now(UTC)),
    )
    monkeypatch.setattr(details, "_due", lambda *_: False)
    waits = {"key": "0" * 32, "kind": "session", "reason": "Resources"}
    first = await details.complete([job(1, **waits)], cluster)
    second = await details.complete([job(1, **waits), job(2, **waits)], cluster)
    assert len(calls) == searches
    assert first[1].detail == second[1].detail == "1 GPU" and (2 in second) == (searches == 2)


async def test_while_the_search_rests_what_was_missing_is_not_shown_for_another_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        waiting_module, "_timed", lambda short, *_: ({each.id: "1 GPU" for each in short}, 1000.0)
    )
    details, cluster = (
        Waiting(cast(Any, SimpleNamespace(has_many_jobs=False))),
        Cluster(taken=datetime.now(UTC)),
    )
    monkeypatch.setattr(details, "_due", lambda *_: False)
    waits = {"key": "0" * 32, "kind": "session", "reason": "Resources"}
    first = await details.complete([job(1, **waits), job(2, **waits)], cluster)
    assert {number: each.detail for number, each in first.items()} == {1: "1 GPU", 2: "1 GPU"}
    later = [job(1, **waits | {"reason": "JobHeldUser"}), job(2, **waits | {"reason": "Priority"})]
    second = await details.complete(later, cluster)
    assert {number: each.detail for number, each in second.items()} == {2: "1 GPU"}


async def test_with_many_jobs_a_poll_does_not_wait_for_that_search(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def timed(short: list[Job], *_: Any) -> tuple[dict[int, str], float]:
        go.wait(60)
        return {job.id: "1 GPU" for job in short}, 0.0

    monkeypatch.setattr(waiting_module, "_timed", timed)
    details, cluster = (
        Waiting(cast(Any, SimpleNamespace(has_many_jobs=True))),
        Cluster(taken=datetime.now(UTC)),
    )
    monkeypatch.setattr(details, "_due", lambda *_: False)
    waits = {"key": "0" * 32, "kind": "session", "reason": "Resources"}
    try:
        async with asyncio.timeout(60):
            assert await details.complete([job(1, **waits)], cluster) == {}
            go.set()
            assert details._search is not None
            await asyncio.wait({details._search})
            found = await details.complete([job(1, **waits)], cluster)
    finally:
        go.set()
    assert found[1].detail == "1 GPU"


@pytest.mark.parametrize(("many", "explained"), [(False, {1, 2}), (True, {1})])
async def test_jobs_of_sbatch_are_explained_like_those_of_carme_unless_there_are_very_many(
    monkeypatch: pytest.MonkeyPatch, many: bool, explained: set[int]
) -> None:
    class Slurm:
        has_many_jobs = many

        async def limits(self, users: list[str]) -> list[Limits]:
            return []

    monkeypatch.setattr(waiting_module, "limit_detail", lambda *_: "4 of 4 GPUs in use")
    details = Waiting(cast(Any, Slurm()))
    session = job(1, key="0" * 32, kind="session", reason="QOSGrpGRES")
    found = await details.complete([session, job(2, reason="QOSGrpGRES")], None)
    assert set(found) == explained
    assert all("4 of 4 GPUs in use" in each.explanation for each in found.values())


async def test_limits_are_read_first_for_users_with_jobs_of_carme(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []

    class Slurm:
        has_many_jobs = False

        async def limits(self, users: list[str]) -> list[Limits]:
            read.append(users)
            return []

    monkeypatch.setattr(waiting_module, "USERS_AT_ONCE", 2)
    details, why = Waiting(cast(Any, Slurm())), {"reason": "QOSGrpGRES"}
    batch_jobs = [job(number, user=user, **why) for number, user in enumerate(("ada", "bob", "eve"))]
    session = job(9, user="zoe", key="0" * 32, kind="session", **why)
    await details.complete([*batch_jobs, session], None)
    assert read == [["zoe", "ada"]]


async def test_when_a_reservation_begins_is_a_moment_of_its_own() -> None:
    begin = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)
    course = Reservation(name="course", start=begin, end=begin + timedelta(hours=1), node_names=["n1"])

    class Slurm:
        has_many_jobs = False

        async def reservations(self) -> list[Reservation]:
            return [course]

    details = Waiting(cast(Any, Slurm()))
    waits = job(1, key="0" * 32, kind="session", reason="Reservation", reservation="course")
    (found,) = (await details.complete([waits], None)).values()
    assert found.detail.startswith("course begins ") and list(moments(found.detail).values()) == [begin]
    assert until_of(found.explanation) is None


@pytest.mark.parametrize(("takes", "count"), [(0.0, 3), (10.0, 2)])
async def test_a_forecast_that_takes_long_is_made_less_often(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, takes: float, count: int
) -> None:
    running = [job(1, state="RUNNING", gpus=1, node_list="n1")]
    broker, clock, plans = Broker(settings, cast(Any, SimpleNamespace())), {"now": 0.0, "worked": 0.0}, []

    async def reservations() -> list[Reservation]:
        return []

    def planned(cluster: Any, jobs: Any, reserved: Any, now: datetime) -> Forecast:
        clock["worked"] += takes
        # As if it were of long ago: its age alone is reason for another one.
        plans.append(Forecast(start=now - timedelta(minutes=2), step_minutes=30))
        return plans[-1]

    monkeypatch.setattr(forecasts_module, "forecast", planned)
    monkeypatch.setattr(broker._bookings, "reservations", reservations)
    monkeypatch.setattr(broker._watch, "cluster", lambda: None)
    monkeypatch.setattr(broker._watch, "jobs", lambda: running)
    times = SimpleNamespace(monotonic=lambda: clock["now"], thread_time=lambda: clock["worked"])
    monkeypatch.setattr(forecasts_module, "time", times)
    for now in (0.0, 100.0, 1000.0):
        clock["now"] = now
        running.append(job(len(running) + 1, state="RUNNING", gpus=1, node_list="n1"))
        await broker._cluster.forecast(cast(Any, None), cast(Any, None))
    assert len(plans) == count


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Any:
    """A broker whose forecasts are made as soon as a test lets them."""
    found: Any = SimpleNamespace(begun=threading.Semaphore(0), go=threading.Semaphore(0), plans=[])

    def planned(cluster: Any, jobs: Any, reserved: Any, now: datetime) -> Forecast:
        found.begun.release()
        assert found.go.acquire(timeout=HANG)
        found.plans.append(Forecast(start=now - timedelta(minutes=2), step_minutes=30))
        return found.plans[-1]

    async def reservations() -> list[Reservation]:
        return []

    broker = Broker(settings, cast(Any, SimpleNamespace()))
    monkeypatch.setattr(forecasts_module, "forecast", planned)
    monkeypatch.setattr(broker._bookings, "reservations", reservations)
    monkeypatch.setattr(broker._watch, "cluster", lambda: None)
    monkeypatch.setattr(broker._watch, "jobs", lambda: [])
    found.ask = lambda: asyncio.ensure_future(broker._cluster.forecast(cast(Any, None), cast(Any, None)))
    return found


async def test_nobody_waits_for_a_forecast_who_can_have_the_one_before(planning: Any) -> None:
    first, second = planning.ask(), planning.ask()
    assert await asyncio.to_thread(planning.begun.acquire, timeout=HANG)
    planning.go.release()
    planning.go.release()
    assert [await first, await second] == planning.plans, "without one both wait, one after the other"
    assert await asyncio.to_thread(planning.begun.acquire, timeout=HANG)
    third = planning.ask()  # the one that there is is old
    assert await asyncio.to_thread(planning.begun.acquire, timeout=HANG)
    assert await planning.ask() is planning.plans[1], "the broker answers while it makes the next one"
    planning.go.release()
    assert await third is planning.plans[2]


async def test_what_a_calendar_shows_of_a_job_is_made_once(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    held = {number: job(number, state="RUNNING", node_list="n1") for number in (1, 2)} | {3: job(3)}
    broker = Broker(settings, cast(Any, SimpleNamespace()))
    monkeypatch.setattr(broker._watch, "jobs", lambda: list(held.values()))
    ask = lambda: broker._jobs.running(cast(Any, None), cast(Any, None))  # noqa: E731
    first, second = await ask()
    assert [first.id, second.id] == [1, 2]
    held[2] = job(2, state="RUNNING", node_list="n2")
    held[3] = job(3, state="RUNNING", node_list="n3")
    again, second_job, third = await ask()
    assert again is first and (second_job.node_list, third.node_list) == ("n2", "n3")
    del held[1]
    assert [each.id for each in await ask()] == [2, 3]


async def test_nan_and_infinity_are_null_in_an_answer(settings: Settings) -> None:
    async def answer(*_: object) -> dict[str, float]:
        return {"share": float("nan"), "most": float("inf")}

    server = Server(settings, cast(Any, SimpleNamespace(answer=answer)))
    parts = await server._answer(cast(Any, None), b"")
    assert json.loads(b"".join(cast(Iterable[bytes], parts)))["result"] == {"share": None, "most": None}


async def test_a_connection_that_was_accepted_last_is_closed_when_the_broker_ends(settings: Settings) -> None:
    server = Server(settings, cast(Any, SimpleNamespace(answer=None)))
    async with server:
        pass
    client, accepted = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=accepted)
    await server._connected(reader, writer)
    with client:
        client.settimeout(HANG)
        await asyncio.sleep(0)  # the transport closes in the loop's next round
        assert await asyncio.to_thread(client.recv, 1) == b""
    assert not server._tasks
