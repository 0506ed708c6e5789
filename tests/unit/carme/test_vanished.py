"""Jobs that left Slurm's queue before the broker saw them end, while the accounting is slow or away."""

import asyncio
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from carme.broker import vanished
from carme.broker.feed import Feed
from carme.broker.sessions import SessionBook
from carme.broker.store import Store
from carme.broker.watch import Watch
from carme.errors import SlurmError
from carme.jobs import Cluster, Job, JobState
from carme.sessions import SessionState
from carme.slurm import UnixAccount, lookups
from patience import HANG

from .session_records import JOB, KEY, reaches
from .test_broker import until


class SlowAccounting:
    """A Slurm without jobs, whose accounting answers when a test lets it."""

    has_many_jobs = False

    def __init__(self) -> None:
        self.answers, self.closes = asyncio.Event(), asyncio.Event()
        self.records: dict[int, Job] = {}
        self.requested: list[list[int]] = []
        self.closings = 0
        self.failure: SlurmError | None = None

    async def pulse(self) -> str:
        return "0"

    async def queue(self) -> list[Job]:
        return []

    async def cluster(self) -> Cluster:
        return Cluster(taken=datetime.now(UTC))

    async def accounted_jobs(self, ids: Iterable[int]) -> dict[int, Job]:
        self.requested.append(list(ids))
        await self.answers.wait()
        if self.failure:
            raise self.failure
        return {job_id: self.records[job_id] for job_id in self.requested[-1] if job_id in self.records}

    async def accounted(self, job_id: int, task: int | None = None) -> Job | None:
        return (await self.accounted_jobs([job_id])).get(job_id)

    async def close_lost(self) -> None:
        self.closings += 1
        await self.closes.wait()


def session(number: int, **changes: Any) -> Job:
    known = {"id": number, "name": f"session-s{number}", "user": "ada", "state": "RUNNING", "kind": "session"}
    return Job.model_validate(known | {"key": f"{number:032}", "node_list": "n1"} | changes)


@pytest.fixture
def slow() -> SlowAccounting:
    return SlowAccounting()


@pytest_asyncio.fixture
async def watch(slow: SlowAccounting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    for name, seconds in (("ANSWER_SECONDS", 0.01), ("AGAIN_SECONDS", 0.0), ("CLOSE_AGAIN_SECONDS", 0.0)):
        monkeypatch.setattr(vanished, name, seconds)
    feed = Feed()
    book = SessionBook(Store(tmp_path), feed)
    await book.open()
    return Watch(cast(Any, slow), 1.0, feed, book)


async def poll(watch: Watch) -> dict[int, Job]:
    """The jobs after another poll."""
    async with asyncio.timeout(HANG):
        await watch._poll()
    return {job.id: job for job in watch.jobs()}


async def answered(watch: Watch) -> dict[int, Job]:
    """The same, once the question to the accounting is over."""
    question = watch._vanished._question
    assert question is not None
    await asyncio.wait({question}, timeout=HANG)
    return await poll(watch)


async def test_a_poll_does_not_wait_for_a_slow_accounting(watch: Watch, slow: SlowAccounting) -> None:
    jobs = [session(number) for number in range(1, 21)]
    slow.records = {job.id: job.model_copy(update={"state": JobState.TIMEOUT}) for job in jobs}
    watch.remember(jobs)
    for _ in range(3):
        # Who asks is answered, and nothing counts as lost.
        assert {job.state for job in (await poll(watch)).values()} == {JobState.RUNNING}
    slow.answers.set()
    assert {job.state for job in (await answered(watch)).values()} == {JobState.TIMEOUT}
    assert slow.requested == [[job.id for job in jobs]]


async def test_what_an_accounting_that_is_away_would_say_is_not_guessed(
    watch: Watch, slow: SlowAccounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vanished, "LOST_SECONDS", 0.0)
    slow.failure = SlurmError("Slurm does not answer.", code="slurm-away")
    slow.answers.set()
    watch.remember([session(1), session(2, state="PENDING", node_list="")])
    await poll(watch)
    for _ in range(3):
        jobs = await poll(watch)
        assert [jobs[number].state for number in (1, 2)] == [JobState.RUNNING, JobState.PENDING]
    monkeypatch.setattr(vanished, "SILENT_SECONDS", -1.0)
    # After a long time nobody waits for it any more.
    jobs = await poll(watch)
    assert {job.state for job in jobs.values()} == {JobState.FAILED}


async def test_a_poll_does_not_wait_while_records_of_lost_jobs_are_closed(
    watch: Watch, slow: SlowAccounting
) -> None:
    slow.answers.set()
    slow.records = {number: session(number) for number in (1, 2)}
    watch.remember([session(1), session(2)])
    assert {job.state for job in (await poll(watch)).values()} == {JobState.FAILED}
    await poll(watch)
    assert slow.closings == 1
    slow.closes.set()
    assert watch._vanished._closing is not None
    await asyncio.wait({watch._vanished._closing}, timeout=HANG)
    await poll(watch)
    assert await watch._vanished.close_lost([]) and slow.closings == 1


async def test_jobs_of_carme_are_looked_up_first(
    watch: Watch, slow: SlowAccounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vanished, "AT_ONCE", 2)
    slow.answers.set()
    batch_jobs = [session(number, key=None, kind="other") for number in (1, 2, 3)]
    watch.remember([*batch_jobs, session(4)])
    await poll(watch)
    await poll(watch)
    assert [sorted(ids) for ids in slow.requested] == [[1, 4], [2, 3]]


async def test_one_question_is_about_all_jobs_that_vanished(site: Any) -> None:
    site.slurm.jobs = [
        JOB | {"A": number, "j": f"session-s{number}", "k": JOB["k"].replace(KEY, f"{number:032}")}
        for number in (7, 8, 9)
    ]
    await reaches(site, SessionState.STARTING, "s9")
    ended = {"User": "ada", "State": "TIMEOUT", "ExitCode": "0:0", "Start": "1795181538"}
    site.slurm.account(*(ended | {"JobIDRaw": number, "JobName": "x"} for number in (7, 8, 9)))
    site.slurm.jobs = []

    async def over() -> bool:
        return {session.state for session in await site.client.sessions(active=False)} == {SessionState.ENDED}

    await until(over)
    words = [word for call in site.slurm.calls("sacct") for word in call["arguments"] if "--jobs=" in word]
    assert words == ["--jobs=7,8,9"]


async def test_a_poll_does_not_wait_for_the_directory_server_and_loses_no_waiting_session(
    watch: Watch, slow: SlowAccounting, accounts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, named, cancelled, submitted = threading.Event(), UnixAccount.named, list[str](), list[int]()

    def hang(name: str) -> UnixAccount:
        go.wait(HANG)
        return named(name)

    async def cancel(number: str, owner: UnixAccount) -> None:
        cancelled.append(number)

    async def submit_again(job: Job, owner: UnixAccount, submission: int) -> int:
        submitted.append(job.id)
        return 9

    async def queue() -> list[Job]:
        return [session(7, failed_node="n1")]

    for name, method in (("cancel", cancel), ("submit_again", submit_again), ("queue", queue)):
        monkeypatch.setattr(slow, name, method, raising=False)
    monkeypatch.setattr(UnixAccount, "named", hang)
    monkeypatch.setattr(lookups, "ACCOUNT_SECONDS", 0.01)
    monkeypatch.setattr(vanished, "LOST_SECONDS", 0.0)
    slow.answers.set()
    slow.closes.set()
    waiting = session(1, state="PENDING", node_list="")
    await watch.add(waiting)
    try:
        await poll(watch)
        found = await answered(watch) if watch._vanished._question else await poll(watch)
        assert found[1] == waiting and found[7].is_running
        going_on, _until = lookups._going_on["ada"]
    finally:
        go.set()
    await asyncio.wait({going_on}, timeout=HANG)
    assert not cancelled and not submitted
    monkeypatch.setattr(lookups, "ACCOUNT_SECONDS", HANG)
    found = await poll(watch)
    while not submitted:
        found = await poll(watch)
    assert cancelled == ["7"] and 9 in found and 1 not in found
