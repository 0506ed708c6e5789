"""What the broker saves of sessions, and for how long; and how its estimates are judged."""

import asyncio
import contextlib
import getpass
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from carme.broker import BrokerClient
from carme.broker.estimates import JUDGED, Estimates
from carme.broker.feed import Feed
from carme.broker.sessions import MOST_OF_USER, RETENTION, SessionBook
from carme.broker.store import Store
from carme.config import Settings
from carme.errors import BrokerUnavailable, CarmeError, NotFound, SlurmError
from carme.jobs import Job, JobState
from carme.sessions import Ending, Mark, ServerStatus, Session, SessionNote, SessionState, Step
from carme.sessions.start_estimates import Range

from .session_records import JOB, KEY, STARTED, reaches


async def test_a_restart_loses_nothing(start: Callable[[], Any], slurm: Any, settings: Settings) -> None:
    slurm.jobs = [JOB, JOB | {"A": 8, "j": "session-s2"}, JOB | {"A": 9, "j": "session-s3"}]
    at = datetime.now(UTC)
    async with start() as site:
        site.act("hub", trusted=True)
        await reaches(site, SessionState.STARTING, "s3")
        note = SessionNote(server=ServerStatus.READY, marks=(Mark(step=Step.ROUTED, at=at),), idle_since=at)
        await site.client.note(7, "ada", note)
        await site.client.note(8, "ada", SessionNote(ending=Ending.IDLE))
        before = await site.client.session("s1")
        cursor = (await site.client.events()).cursor
    # While it was away one job ended and was forgotten by Slurm's controller, another by everybody.
    slurm.jobs = [JOB]
    ended = {"JobIDRaw": 8, "User": "ada", "State": "CANCELLED by 1", "ExitCode": "0:15"}
    slurm.account(ended | {"JobName": "session-s2", "Comment": JOB["k"]})
    async with start() as site:
        site.act("hub", trusted=True)
        assert await site.client.session("s1") == before
        assert (await reaches(site, SessionState.ENDED, "s2")).ending is Ending.IDLE
        assert (await reaches(site, SessionState.ENDED, "s3")).ending is Ending.LOST
        assert (await site.client.events(cursor)).complete
    slurm.jobs = []
    async with start() as site:
        site.act("hub", trusted=True)
        assert {session.name for session in await site.client.sessions(active=False)} == {"s1", "s2", "s3"}
        assert (await site.client.session("s2")).ending is Ending.IDLE


async def test_a_number_that_slurm_uses_again_is_another_session(
    start: Callable[[], Any], slurm: Any
) -> None:
    slurm.jobs = [JOB | {"T": "FAILED"}]
    async with start() as site:
        await reaches(site, SessionState.ENDED)
    slurm.jobs = [JOB | {"j": "session-s2", "k": JOB["k"].replace(KEY, "1" * 32), "V": STARTED + 60}]
    async with start() as site:
        assert (await reaches(site, SessionState.STARTING, "s2")).ending is None
        assert [session.name for session in await site.client.sessions(active=False)] == ["s2"]


def facts_of(job_id: int, state: JobState = JobState.RUNNING, **known: Any) -> Job:
    values: dict[str, Any] = {"id": job_id, "kind": "session", "name": f"session-s{job_id}", "user": "ada"}
    return Job(**(values | {"state": state, "node_list": "n1"} | known))


@contextlib.asynccontextmanager
async def book_at(folder: Path, clock: Callable[[], datetime]) -> AsyncIterator[SessionBook]:
    book = SessionBook(Store(folder), Feed(), clock)
    await book.open()
    yield book
    await book.close()


async def test_ended_sessions_are_dropped_by_age_and_number(tmp_path: Path) -> None:
    now = datetime(2026, 11, 1, tzinfo=UTC)
    async with book_at(tmp_path, lambda: now) as book:
        book.observe([facts_of(1, JobState.FAILED), facts_of(2), facts_of(3, user="bob")], None)
        now += RETENTION / 2
        book.observe([facts_of(3, JobState.FAILED, user="bob")], None)
        now += RETENTION / 2 + timedelta(seconds=1)
        book.expire()
        assert [session.job_id for session in book.sessions(None, active=False)] == [3, 2]
    async with book_at(tmp_path, lambda: now) as book:
        assert [session.job_id for session in book.sessions(None, active=False)] == [3, 2]
        many = range(1000, 1010 + MOST_OF_USER)
        book.observe([facts_of(number, JobState.FAILED) for number in many], None)
        book.expire()
        assert [session.job_id for session in book.sessions("ada", active=False)] == [*reversed(many[10:]), 2]
        assert len(book.sessions("bob", active=False)) == 1


async def test_the_full_list_has_active_and_recently_ended_sessions(tmp_path: Path) -> None:
    now = datetime(2026, 11, 1, tzinfo=UTC)
    async with book_at(tmp_path, lambda: now) as book:
        book.observe([facts_of(1, JobState.FAILED), facts_of(2)], None)
        assert [session.job_id for session in book.after(None, "ada")] == [1, 2]
        now += timedelta(days=2)
        assert [session.job_id for session in book.after(None, None)] == [2]
        assert book.after(None, "bob") == []


async def test_a_damaged_record_costs_one_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with book_at(tmp_path, lambda: datetime.now(UTC)) as book:
        book.observe([facts_of(1), facts_of(2)], None)
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.sqlite")) as file, file:
        file.execute("UPDATE sessions SET facts = '{' WHERE job_id = 1")
    async with book_at(tmp_path, lambda: datetime.now(UTC)) as book:
        assert [session.job_id for session in book.sessions(None, active=False)] == [2]
    assert "job 1 is left out" in caplog.text


async def test_what_a_full_disk_did_not_take_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock() -> datetime:
        return datetime.now(UTC)

    async with book_at(tmp_path, clock) as book:
        book.observe([facts_of(1), facts_of(2, JobState.FAILED)], None)
        await book.save()
        with monkeypatch.context() as full:
            full.setattr(Store, "_write", Mock(side_effect=sqlite3.OperationalError("disk is full")))
            book.note(1, "ada", SessionNote(server=ServerStatus.READY))
            await book.save()
        await book.save()
        async with book_at(tmp_path, clock) as restored:
            assert restored.session("s1", "ada").state is SessionState.READY


async def test_what_waits_to_be_written_when_the_broker_ends_is_stored(tmp_path: Path) -> None:
    async with book_at(tmp_path, lambda: datetime.now(UTC)) as book:
        book.observe([facts_of(1)], None)
        go_on = threading.Event()
        busy = asyncio.create_task(book._store._run(go_on.wait))
        saving = asyncio.create_task(book.save())
        await asyncio.sleep(0)  # both have reached the store's one thread
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        go_on.set()
        await busy
    async with book_at(tmp_path, lambda: datetime.now(UTC)) as book:
        assert [session.job_id for session in book.sessions(None, active=False)] == [1]


async def test_a_store_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    (tmp_path / "sessions.sqlite").write_text("no database " * 100)
    with pytest.raises(CarmeError, match=r"sessions\.sqlite cannot be opened: file is not a database"):
        await Store(tmp_path).open()
    (tmp_path / "sessions.sqlite").unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.sqlite")) as file:
        file.execute("PRAGMA user_version = 99")
    with pytest.raises(CarmeError, match="newer version of Carme"):
        await Store(tmp_path).open()


async def test_the_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    await Store(tmp_path / "state").open()
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_what_was_answered_survives_a_kill(settings: Settings, slurm: Any, folder: Path) -> None:
    """A broker in a process of its own, killed with SIGKILL right after its answers."""
    slurm.jobs = [JOB]
    file = folder / "carme.toml"
    file.write_text(
        f'[site]\nurl = "{settings.site.url}"\n[slurm]\ncluster = "c"\npoll_seconds = 0.1\n'
        f'[broker]\nsocket = "{settings.broker.socket}"\naudit_log = "{settings.broker.audit_log}"\n'
        f'state_directory = "{settings.broker.state_directory}"\n'
        f'services = ["{getpass.getuser()}"]\n'
    )
    client = BrokerClient(settings.broker.socket)

    def started() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-c",
            "from carme.broker.daemon import main; main()",
            "--config",
            str(file),
        ]
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})

    def session() -> Session:
        while True:
            with contextlib.suppress(BrokerUnavailable, SlurmError, NotFound):
                return client.session("s1")
            time.sleep(0.02)

    broker = started()
    try:
        session()
        for number in range(20):
            client.note(7, "ada", SessionNote(message=f"Note {number}.", server=ServerStatus.UNREACHABLE))
        broker.send_signal(signal.SIGKILL)
        broker.wait()
        broker = started()
        assert session().sentence == "Note 19."
    finally:
        broker.kill()
        broker.wait()


# Estimates


async def test_estimates_are_judged_by_the_first_range_and_stored(tmp_path: Path) -> None:
    now = datetime(2026, 11, 1, 12, tzinfo=UTC)
    hour = timedelta(hours=1)

    def waits(number: int, planned: datetime) -> Job:
        return facts_of(number, JobState.PENDING, node_list="", planned_start=planned, priority=5)

    async with book_at(tmp_path, lambda: now) as book:
        book.observe([waits(1, now + hour), waits(2, now + hour), waits(3, now + hour)], None)
        estimate = book.sessions("ada", active=True)[0].estimate
        assert estimate and estimate.judged == 0
    async with book_at(tmp_path, lambda: now) as book:
        book.observe([waits(1, now + 9 * hour), waits(2, now + hour), waits(3, now + hour)], None)
        book.observe(
            [
                facts_of(1, started=now + hour),
                facts_of(2, started=now + 2 * hour),
                facts_of(3, JobState.CANCELLED, node_list=""),
                waits(4, now + hour),
            ],
            None,
        )
        assert book.estimates.record == (1, 2)
        book.observe([waits(4, now + hour)], None)
        estimate = book.session("s4", "ada").estimate
        assert estimate and (estimate.correct, estimate.judged) == (1, 2)
    async with book_at(tmp_path, lambda: now) as book:
        assert book.estimates.record == (1, 2)


def test_only_the_latest_estimates_count() -> None:
    now = datetime(2026, 11, 1, 12, tzinfo=UTC)
    estimates = Estimates([])
    for number in range(3 * JUDGED):
        estimates.give(number, Range(now, now))
        estimates.started(number, now if number % 2 else now + timedelta(days=1))
    assert estimates.record == (JUDGED / 2, JUDGED)
    changed, dropped = estimates.take_changes()
    assert len(changed) == JUDGED and len(dropped) == 2 * JUDGED
    assert estimates.take_changes() == ([], [])
