"""Programs of Slurm and of users: which cannot be started, which do not end, and which are named too much."""

import asyncio
import errno
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carme.broker import preemptions
from carme.broker.access_cache import AccessCache
from carme.broker.concurrency import ConcurrencyLimit
from carme.broker.preemptions import Preemptions
from carme.errors import CarmeError, NotFound, SlurmError
from carme.jobs import JobRequest
from carme.slurm import SlurmCommands, UnixAccount, commands, lookups, programs
from carme.slurm.gateway import ExitStatus
from patience import HANG

from .conftest import PYTHON, RUNNING, FakeSlurm


@pytest.fixture
def ada(accounts: None) -> UnixAccount:
    return UnixAccount.named("ada")


# Which cannot be started


async def test_a_program_that_cannot_be_started_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SlurmError, match=r"true cannot be started: Argument list too long"):
        await programs.run("true", "x" * (1 << 18))

    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(SlurmError, match=r"squeue cannot be started: Resource temporarily unavailable"):
        await programs.run("/usr/bin/squeue")


# Which do not end


class Unkillable:
    """A program that waits for a file server, as asyncio shows it."""

    def __init__(self) -> None:
        self.pid, self.returncode = 1 << 30, None  # there is no such process
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self.stdin = SimpleNamespace(write=lambda _: None, drain=self._drain, close=lambda: None)
        self._transport = SimpleNamespace(close=lambda: None)
        self.file_server_answers = asyncio.Event()

    async def _drain(self) -> None:
        pass

    async def wait(self) -> int:
        await self.file_server_answers.wait()
        return -9


async def test_nobody_waits_for_a_program_that_nothing_can_end(
    ada: UnixAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Unkillable()

    async def start(*_: object, **__: object) -> Unkillable:
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(programs, "TIMEOUT", 0.05)
    monkeypatch.setattr(programs, "END_SECONDS", 0.01)
    reading = asyncio.create_task(programs.run("reader", owner=ada))
    await asyncio.wait({reading}, timeout=HANG)
    assert reading.done()
    with pytest.raises(SlurmError, match="had not ended"):
        await reading
    # No more of them: each would hold a process of this host.
    with pytest.raises(SlurmError, match="home directory of ada does not answer"):
        programs.check_home(ada)
    programs.check_home(UnixAccount.named("bob"))
    (waiting,) = programs._unended[ada.uid]
    process.file_server_answers.set()
    await asyncio.wait({waiting}, timeout=HANG)
    await asyncio.sleep(0)
    programs.check_home(ada)


async def test_a_request_that_waits_for_a_place_too_long_fails() -> None:
    limit = ConcurrencyLimit(2, 1, patience=0.01)
    async with limit.slot(1):
        with pytest.raises(CarmeError, match="Try again in a moment") as caught:
            async with limit.slot(1):
                pass
        assert caught.value.code == "busy"
        async with limit.slot(2):
            with pytest.raises(CarmeError, match="Try again"):
                async with limit.slot(3):
                    pass
        async with limit.slot(3):  # its own place is free again
            pass
    async with limit.slot(1):
        pass


async def test_jobs_are_cancelled_although_the_homes_of_others_hang(site: Any) -> None:
    places = site.broker._context.programs
    await site.queue([RUNNING])
    go, held = asyncio.Event(), asyncio.Semaphore(0)

    async def hang(uid: int) -> None:
        async with places.slot(uid):
            held.release()
            await go.wait()

    hanging = [asyncio.create_task(hang(uid)) for uid in range(16)]
    async with asyncio.timeout(HANG):
        for _ in hanging:
            await held.acquire()
        await site.client.cancel(7)
    go.set()
    await asyncio.gather(*hanging)
    assert [call["arguments"] for call in site.slurm.calls("scancel")] == [["7"]]


# Directory servers


async def test_others_are_answered_while_the_groups_of_a_user_are_looked_up(
    site: Any, request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await site.client.submit(request_)
    identity, go, requested = UnixAccount.identity, threading.Event(), threading.Event()

    def slow(account: UnixAccount) -> dict[str, Any]:
        requested.set()
        assert go.wait(HANG)
        return identity(account)

    monkeypatch.setattr(UnixAccount, "identity", slow)
    reading = asyncio.create_task(site.client.log(job_id))
    try:
        async with asyncio.timeout(HANG):
            assert await asyncio.to_thread(requested.wait, HANG)
            assert [job.id for job in await site.client.jobs()] == [job_id]
        assert not reading.done()
    finally:
        go.set()
    assert (await reading).size == 0


async def test_groups_that_do_not_come_are_an_error(
    ada: UnixAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(UnixAccount, "identity", lambda _: go.wait(HANG) and {})
    monkeypatch.setattr(lookups, "IDENTITY_SECONDS", 0.05)
    try:
        with pytest.raises(SlurmError, match="groups of the account ada cannot be read"):
            await programs.run("true", owner=ada)
    finally:
        go.set()


async def test_one_look_up_of_an_account_hangs_at_a_time_and_holds_nobody_up(
    accounts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, named, requested = threading.Event(), UnixAccount.named, list[str]()

    def slow(name: str) -> UnixAccount:
        requested.append(name)
        if name == "bob":
            go.wait(HANG)
        return named(name)

    monkeypatch.setattr(UnixAccount, "named", slow)
    try:
        monkeypatch.setattr(lookups, "ACCOUNT_SECONDS", 0.05)
        with pytest.raises(SlurmError, match="account bob cannot be looked up"):
            await lookups.account_named("bob")
        monkeypatch.setattr(lookups, "ACCOUNT_SECONDS", HANG)
        assert (await lookups.account_named("ada")).name == "ada"
        with pytest.raises(SlurmError, match="account bob cannot be looked up"):
            await lookups.account_named("bob")
        assert requested == ["bob", "ada"]
        going_on, _until = lookups._going_on["bob"]
    finally:
        go.set()
    await asyncio.wait({going_on}, timeout=HANG)
    assert (await lookups.account_named("bob")).name == "bob"


async def test_a_poll_does_not_wait_long_for_the_owner_of_a_preempted_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = threading.Event()

    def named(name: str) -> UnixAccount:
        go.wait(HANG)
        raise NotFound(f"There is no account {name}.")

    monkeypatch.setattr(UnixAccount, "named", named)
    monkeypatch.setattr(preemptions, "ANSWER_SECONDS", 0.05)
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            await Preemptions(cast(Any, None))._visible_to("ada", [])
        assert time.monotonic() - begin < HANG
    finally:
        go.set()


async def test_groups_of_one_user_that_do_not_come_keep_nobody_else_waiting(
    accounts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, requested = threading.Event(), threading.Event()

    def groups(account: UnixAccount) -> list[str]:
        if account.name == "bob":
            requested.set()
            assert go.wait(HANG)
        return []

    class Slurm:
        async def associations(self, user: str) -> list[Any]:
            return []

    monkeypatch.setattr(UnixAccount, "groups", groups)
    cache = AccessCache(cast(Any, Slurm()))
    slow = asyncio.create_task(cache.of(UnixAccount.named("bob")))
    try:
        async with asyncio.timeout(HANG):
            assert await asyncio.to_thread(requested.wait, HANG)
            assert (await cache.of(UnixAccount.named("ada"))).user == "ada"
        assert not slow.done()
    finally:
        go.set()
    assert (await slow).user == "bob"


# Many names


MANY = range(10_000_000, 10_015_000)  # 135 kB as one argument, for which Linux has 128 KiB


async def test_the_ends_of_very_many_jobs_are_read(slurm: FakeSlurm, accounts: None) -> None:
    slurm.jobs = [RUNNING | {"A": MANY[1], "exit": 3 << 8}, RUNNING | {"A": 7, "exit": 0}]
    found = await SlurmCommands(PYTHON).exit_statuses(MANY)
    assert found == {MANY[1]: ExitStatus(3, 0)}


async def test_which_of_very_many_jobs_a_user_sees_is_read(slurm: FakeSlurm, ada: UnixAccount) -> None:
    slurm.jobs = [RUNNING | {"A": MANY[1]}, RUNNING | {"A": 7}]
    assert await SlurmCommands(PYTHON).visible_jobs(MANY, ada) == {MANY[1]}


async def test_accounts_of_very_many_projects_are_read_in_parts(
    slurm: FakeSlurm, accounts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_MOST_NAMED", 2)
    cluster = SlurmCommands(PYTHON, "test")
    names = [f"carme-project{number}" for number in range(3)]
    for name in names:
        await cluster.make_account(name)
        await cluster.add_member(name, "ada")
    assert sorted(await cluster.project_accounts()) == names
    calls = [call["arguments"] for call in slurm.calls("sacctmgr") if "association" in call["arguments"]]
    named = [word for call in calls for word in call if word.startswith("account=")]
    assert [word.count(",") + 1 for word in named] == [2, 1]
