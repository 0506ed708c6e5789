"""What the broker does beside answering requests goes on after a failure, or the broker ends."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from carme.broker import daemon, policy, stage_in
from carme.broker.concurrency import ConcurrencyLimit
from carme.broker.feed import Feed
from carme.broker.policy import Policy
from carme.broker.reports import Reports
from carme.broker.session_service import SessionService
from carme.broker.stage_in import StageIns
from carme.broker.watch import Watch
from carme.config import Settings
from carme.jobs import Job
from carme.reports.metrics import Metrics
from carme.slurm import SlurmCommands, UnixAccount
from patience import HANG

from .conftest import PYTHON, FakeSlurm
from .report_samples import BEGIN, END, job, usage


@pytest.fixture
def serve(
    settings: Settings, slurm: FakeSlurm, accounts: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], asyncio.Task[None]]:
    """Starts the daemon, in this process."""
    monkeypatch.setattr(daemon, "collect_rarely", lambda: None)
    monkeypatch.setattr(daemon.resource, "setrlimit", lambda *_: None)
    opened = contextlib.nullcontext(SlurmCommands(PYTHON, "test"))
    return lambda: asyncio.create_task(daemon.serve(settings, cast(Any, opened)))


async def test_a_broker_that_does_not_watch_slurm_any_more_ends_with_an_error(
    serve: Callable[[], asyncio.Task[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_watch: Watch) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(Watch, "run", fails)
    serving = serve()
    await asyncio.wait({serving}, timeout=HANG)
    assert serving.done()
    with pytest.raises(ExceptionGroup) as caught:
        await serving
    assert caught.group_contains(RuntimeError, match="foresaw")


@pytest_asyncio.fixture
async def ready(
    serve: Callable[[], asyncio.Task[None]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """A daemon that answers."""
    answers = asyncio.Event()
    monkeypatch.setattr(daemon, "notify", lambda state: answers.set() if state == "READY=1" else None)
    serving = serve()
    async with asyncio.timeout(HANG):
        await answers.wait()
    yield
    serving.cancel()
    await asyncio.wait({serving})


async def test_look_ups_that_hang_leave_threads_to_others(ready: None) -> None:
    go = threading.Event()
    hanging = [asyncio.create_task(asyncio.to_thread(go.wait, HANG)) for _ in range(40)]
    await asyncio.sleep(0)  # they are in line before the next one
    try:
        async with asyncio.timeout(HANG / 2):
            assert await asyncio.to_thread(lambda: "answered") == "answered"
    finally:
        go.set()
        await asyncio.gather(*hanging)


async def test_losses_that_no_mean_can_be_made_of_are_left_out(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"carme_training_loss": "1.5e308", "carme_job_memory_used_bytes": "1e9"}

    def ask(_self: object, path: str, parameters: list[tuple[str, Any]]) -> Any:
        query = dict(parameters)["query"]
        named = [name for name in values if name in query]
        if path != "/api/v1/query_range" or not named:
            return {"data": {"result": []}}
        moments = range(int(BEGIN.timestamp()), int(END.timestamp()), 15)
        series = {"metric": {"node": "n1"}, "values": [[moment, values[named[0]]] for moment in moments]}
        if "loss" in query:
            series["metric"] = {}
        return {"data": {"result": [series]}}

    monkeypatch.setattr("carme.reports.prometheus.Prometheus.ask", ask)
    metrics = Metrics("http://prometheus.example.org", Path("/nonexistent"))
    used, curves = await metrics.usage(7, BEGIN, END)
    assert used is not None and {curve.what for curve in curves} == set()
    values["carme_training_loss"] = "0.5"
    _used, curves = await metrics.usage(7, BEGIN, END)
    assert {curve.what for curve in curves} == {"loss"}


def with_metrics(settings: Settings, **more: Any) -> Settings:
    place = settings.monitoring.model_copy(update={"prometheus": "http://prometheus.example.org", **more})
    return settings.model_copy(update={"monitoring": place})


async def test_a_job_that_cannot_be_recorded_keeps_no_other_job_from_its_record(settings: Settings) -> None:
    written: dict[int, str] = {}
    second_written = asyncio.Event()

    class Slurm:
        async def admin_comments(self, ids: list[int]) -> dict[int, str]:
            return dict.fromkeys(ids, "")

        async def set_admin_comment(self, job_id: int, text: str) -> None:
            written[job_id] = text
            second_written.set()

    async def used(job_id: int, *_: object) -> Any:
        if job_id == 7:
            raise OverflowError("intermediate overflow in fsum")
        return usage(), []

    watch = SimpleNamespace(ended=lambda: [job(), job(id=8)], job=lambda _: None)
    reports = Reports(with_metrics(settings), cast(Any, Slurm()), cast(Any, watch), Feed())
    reports._metrics = cast(Any, SimpleNamespace(usage=used))
    running = asyncio.create_task(reports.run())
    try:
        await asyncio.wait({running, asyncio.create_task(second_written.wait())}, timeout=HANG,
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        assert set(written) == {8} and not running.done()
    finally:
        running.cancel()


async def test_the_policy_goes_on_after_a_look_that_failed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = 0
    again = asyncio.Event()

    async def evaluate(*_: object) -> None:
        nonlocal polls
        polls += 1
        if polls > 1:
            again.set()
        raise RuntimeError("nobody foresaw this")

    rules = settings.monitoring.policy.model_copy(update={"alerts": ["Idle"]})
    found = Policy(with_metrics(settings, policy=rules), cast(Any, None), cast(Any, None), cast(Any, None))
    found._prometheus = cast(Any, SimpleNamespace(ask=lambda *_: {"data": {"alerts": []}}))
    monkeypatch.setattr(found, "evaluate", evaluate)
    monkeypatch.setattr(policy, "POLL_SECONDS", 0.0)
    await goes_on(found.run(), again)


async def goes_on(work: Any, again: asyncio.Event) -> None:
    """See that a background task has its next round."""
    running, waiting = asyncio.create_task(work), asyncio.create_task(again.wait())
    try:
        await asyncio.wait({running, waiting}, timeout=HANG, return_when=asyncio.FIRST_COMPLETED)
        assert again.is_set() and not running.done()
    finally:
        running.cancel()
        waiting.cancel()


async def test_following_data_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0
    again = asyncio.Event()

    def jobs() -> list[Job]:
        nonlocal rounds
        rounds += 1
        if rounds > 1:
            again.set()
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(stage_in, "PROGRESS_SECONDS", 0.0)
    context = SimpleNamespace(watch=SimpleNamespace(jobs=jobs))
    await goes_on(StageIns(cast(Any, context), cast(Any, None), cast(Any, None)).follow(), again)


async def test_a_log_that_cannot_be_read_for_any_reason_counts_as_empty() -> None:
    logged: dict[int, str] = {}

    async def log_tail(_job: Job) -> str:
        raise OSError(11, "Resource temporarily unavailable")

    async def nothing() -> None:
        pass

    book = SimpleNamespace(logged=logged.__setitem__, save=nothing)
    context = SimpleNamespace(book=book, feed=SimpleNamespace(notify=nothing))
    sessions = SessionService(cast(Any, context), cast(Any, SimpleNamespace(log_tail=log_tail)))
    await sessions._read_log_tail(job(ended=END + timedelta(seconds=1)))
    assert logged == {7: ""}


def staged(*jobs: tuple[int, str]) -> list[Job]:
    """Jobs that wait for their data, and the jobs that bring it, with numbers that are greater by 10."""
    known = []
    for number, key in jobs:
        waits = {"id": number, "key": key, "name": "train", "user": "ada", "reason": "Dependency"}
        first = {"id": 10 + number, "key": "c" * 31 + str(number), "name": f"stage-{key[:12]}", "user": "ada"}
        known += [Job.model_validate(waits | {"state": "PENDING"})]
        known += [Job.model_validate(first | {"state": "RUNNING"})]
    return known


async def test_data_on_its_way_is_reported_while_another_log_hangs_or_fails() -> None:
    hangs, is_reported = asyncio.Event(), asyncio.Event()
    reported: dict[int, str] = {}

    async def log_tail(job: Job) -> str:
        if job.id == 11:
            await hangs.wait()
        if job.id == 12:
            raise OSError(11, "Resource temporarily unavailable")
        return "carme-job: data on n1: imagenet: 45 %\n"

    def data_is(data: dict[int, str]) -> None:
        reported.update(data)
        if reported.get(3):
            is_reported.set()

    known = staged((1, "a" * 32), (2, "b" * 32), (3, "d" * 32))
    context = SimpleNamespace(watch=SimpleNamespace(jobs=lambda: known, data_is=data_is))
    files = SimpleNamespace(log_tail=log_tail)
    data = StageIns(cast(Any, context), cast(Any, None), cast(Any, files))
    following = asyncio.create_task(data._follow_once())
    async with asyncio.timeout(HANG):
        await is_reported.wait()
        assert not following.done() and 1 not in reported
        hangs.set()
        await following
    assert reported == {1: "imagenet: 45 %", 2: "", 3: "imagenet: 45 %"}


async def test_a_stage_in_job_that_finds_no_place_to_be_cancelled_is_cancelled_by_the_polls(
    accounts: None,
) -> None:
    abandoned = list[str]()

    async def abandon(key: str) -> None:
        abandoned.append(key)

    (_waiting, stage_in_job) = staged((1, "a" * 32))
    watch = SimpleNamespace(unwanted=lambda _: None, job=lambda _: stage_in_job, abandon=abandon)
    context = SimpleNamespace(watch=watch, cancels=ConcurrencyLimit(0, 1, patience=0.01))
    data = StageIns(cast(Any, context), cast(Any, None), cast(Any, None))
    await data.cancel(stage_in_job.id, UnixAccount.named("ada"))
    assert abandoned == [stage_in_job.key]


async def test_data_on_its_way_is_followed_for_all_jobs_at_once() -> None:
    begun = 0
    both = asyncio.Event()
    reported: dict[int, str] = {}

    async def log_tail(_job: Job) -> str:
        nonlocal begun
        begun += 1
        if begun == 2:
            both.set()
        await both.wait()
        return "carme-job: data on n1: imagenet: 45 %\n"

    known = staged((1, "a" * 32), (2, "b" * 32))
    watch = SimpleNamespace(jobs=lambda: known, data_is=reported.update)
    files = SimpleNamespace(log_tail=log_tail)
    data = StageIns(cast(Any, SimpleNamespace(watch=watch)), cast(Any, None), cast(Any, files))
    async with asyncio.timeout(HANG):
        await data._follow_once()
    assert reported == {1: "imagenet: 45 %", 2: "imagenet: 45 %"}
