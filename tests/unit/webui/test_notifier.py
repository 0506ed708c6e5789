"""Open pages learn of changes at once; the sync follows the broker by itself."""

import asyncio
import fcntl
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.core.management import CommandError, call_command
from django.db import connection
from real_redis import redis
from redis import ConnectionError

from carme_webui import broker_sync
from carme_webui import notifier as notifier_module
from carme_webui.accounts.models import User
from carme_webui.asgi import application
from carme_webui.broker_sync import BrokerSync
from carme_webui.notifier import CHANGES, Notifier, notifier
from carme_webui.sessions.models import Session
from patience import HANG

from .conftest import PASSWORD, REDIS, Browser, needs_redis
from .fake_broker import FakeBroker, make_session
from .fake_hub import FakeHub

LONG = HANG


@needs_redis
async def test_users_who_wait_are_woken_by_changes_of_their_own() -> None:
    # Two, as in two processes of the portal.
    notifying, waiting = Notifier(REDIS.address), Notifier(REDIS.address)
    seen = notifying.version("alice")
    page = asyncio.create_task(waiting.wait("alice", seen, LONG))
    bobs_page = asyncio.create_task(waiting.wait("bob", waiting.version("bob"), LONG))
    await subscribed(waiting)
    await asyncio.to_thread(notifying.notify, ["bob"])
    assert await bobs_page != seen and not page.done()
    await asyncio.to_thread(notifying.notify, ["alice"])
    assert await page == waiting.version("alice") == notifying.version("alice") != seen


async def subscribed(*notifiers: Notifier) -> None:
    """Wait until these notifiers receive changes in this event loop: Redis knows a subscription earlier."""
    loop = asyncio.get_running_loop()
    while not all(loop in each._listeners and each._listeners[loop].hears for each in notifiers):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def settled() -> None:
    """Wait until no notifier looks for a Redis that was away: then all that it reports is reported."""
    for thread in threading.enumerate():
        if thread.name == "redis":
            await asyncio.to_thread(thread.join, LONG)
            assert not thread.is_alive()


@needs_redis
async def test_what_came_before_is_not_missed() -> None:
    notifier = Notifier(REDIS.address)
    seen = notifier.version("alice")
    notifier.notify(["alice"])
    assert await notifier.wait("alice", seen, LONG) != seen
    assert await notifier.wait("alice", "", LONG) == notifier.version("alice"), "also after a restart"


@needs_redis
async def test_changes_for_all_wake_all() -> None:
    notifier = Notifier(REDIS.address)
    waiting = [
        asyncio.create_task(notifier.wait(user, notifier.version(user), LONG)) for user in ("alice", "bob")
    ]
    await subscribed(notifier)
    await asyncio.to_thread(notifier.notify_all)
    await asyncio.gather(*waiting)


@needs_redis
async def test_waiting_ends_and_leaves_nothing_behind() -> None:
    notifier = Notifier(REDIS.address)
    seen = notifier.version("alice")
    assert await notifier.wait("alice", seen, 0.01) == seen
    cancelled = asyncio.create_task(notifier.wait("alice", seen, 10 * LONG))
    there = notifier._listeners[asyncio.get_running_loop()]._waiting
    while not there:  # noqa: ASYNC110
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled], timeout=LONG)
    assert cancelled.cancelled() and not there


@needs_redis
async def test_open_pages_survive_a_dead_redis_and_hear_of_changes_after_it(tmp_path_factory) -> None:
    with redis(tmp_path_factory.mktemp("r")) as server:
        notifier = Notifier(server.address)
        seen = notifier.version("alice")
        waiting = asyncio.create_task(notifier.wait("alice", seen, LONG))
        await asyncio.sleep(0)
        server.kill()
        seen = await waiting
        notifier.notify(["alice"])  # fails nobody
        notifier.count_booking()
        assert await notifier.wait("alice", seen, LONG) != seen, "the page looks by itself"
        server.start()
        await settled()
        while (seen := await notifier.wait("alice", seen, LONG)).startswith("away"):
            pass
        waiting = asyncio.create_task(notifier.wait("alice", seen, LONG))
        await asyncio.sleep(0)
        await asyncio.to_thread(notifier.notify, ["alice"])
        assert await waiting == notifier.version("alice") != seen


@needs_redis
async def test_a_redis_that_hangs_holds_up_one_request_and_no_event_is_lost(
    tmp_path_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier_module, "PATIENCE", 1.0)
    with redis(tmp_path_factory.mktemp("r")) as server:
        notifying, waiting = Notifier(server.address), Notifier(server.address)
        with server.standing_still():
            # The first subscription is given up as well.
            seen = await asyncio.wait_for(waiting.wait("alice", "", LONG), LONG)
            assert seen.startswith("away")
            await asyncio.to_thread(notifying.notify, ["alice"])
            asking: list[str] = []

            def ask(*_arguments: object) -> None:
                asking.append(threading.current_thread().name)
                raise ConnectionError

            with monkeypatch.context() as patched:
                patched.setattr("redis.connection.ConnectionPool.get_connection", ask)
                notifying.notify(["alice"])
                notifying.count_booking()
                assert notifying.version("alice").startswith("away") and not notifying.redis_answers()
            assert threading.current_thread().name not in asking
        # Each of the two may count a change for all when it is back.
        while seen.startswith("away") or seen != notifying.version("alice"):
            seen = await waiting.wait("alice", seen, LONG)


@needs_redis
async def test_a_change_that_redis_refuses_is_reported_as_soon_as_it_is_taken(tmp_path_factory) -> None:
    with redis(tmp_path_factory.mktemp("r")) as server, server.client() as client:
        notifier = Notifier(server.address)
        seen = notifier.version("alice")
        waiting = asyncio.create_task(notifier.wait("alice", seen, LONG))
        await subscribed(notifier)
        client.config_set("maxmemory", 1)
        notifier.notify(["alice"])
        assert not waiting.done()
        client.config_set("maxmemory", 0)
        assert await asyncio.wait_for(waiting, LONG) != seen


@needs_redis
async def test_what_cannot_be_read_does_not_end_the_listening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier_module, "PAUSE", 0.01)
    notifier = Notifier(REDIS.address)
    seen = notifier.version("alice")
    waiting = asyncio.create_task(notifier.wait("alice", seen, LONG))
    await subscribed(notifier)
    with REDIS.client() as client:
        client.publish(CHANGES, "no JSON")
    assert await asyncio.wait_for(waiting, LONG) != seen
    assert "the next try follows" in caplog.text


@needs_redis
async def test_the_listening_ends_whenever_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of redis-py can swallow a cancellation; a process of the portal would then not end."""
    monkeypatch.setattr(notifier_module, "PAUSE", 0.01)
    for milliseconds in range(60):
        notifier, earlier_tasks = Notifier(REDIS.address), asyncio.all_tasks()
        waiting = asyncio.create_task(notifier.wait("alice", notifier.version("alice"), LONG))
        await subscribed(notifier)
        with REDIS.client() as client:
            client.publish(CHANGES, "no JSON")  # it subscribes anew
        await waiting
        await asyncio.sleep(milliseconds / 2000)  # somewhere in that
        (listening,) = [task for task in asyncio.all_tasks() - earlier_tasks if "_follow" in repr(task)]
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(listening, LONG)


def test_without_a_redis_pages_do_not_all_poll_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    notifier, users = Notifier("memory://"), [f"user{number}" for number in range(100)]
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    before = [notifier.version(user) for user in users]
    monkeypatch.setattr("time.time", lambda: 1_000_001.0)
    changed = sum(notifier.version(user) != old for user, old in zip(users, before, strict=True))
    assert 15 < changed < 55


async def test_without_a_redis_open_pages_poll_for_changes() -> None:
    notifier = Notifier("memory://")
    notifier.notify(["alice"])
    seen = notifier.version("alice")
    assert await notifier.wait("alice", seen, LONG) != seen


def sign_in() -> str:
    found = Browser()
    found.force_login(User.objects.create_user("alice", password=PASSWORD))
    return "; ".join(f"{name}={cookie.value}" for name, cookie in found.cookies.items())


async def first_event(cookies: str, seen: str, opened: asyncio.Event) -> str:
    """The first event of a stream of updates, read as a browser reads it: while it is open."""
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    requests = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.wait([found])
            return {"type": "http.disconnect"}
        return requests.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        text = message.get("body", b"").decode()
        if "retry:" in text:
            opened.set()
        if "event: update" in text and not found.done():
            found.set_result(text)

    headers = {"host": "carme.example:8443", "x-forwarded-proto": "https", "cookie": cookies}
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/updates/",
        "query_string": f"seen={seen}".encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await asyncio.wait_for(application(scope, receive, send), LONG)
    return found.result()


@needs_redis
@pytest.mark.django_db(transaction=True)
async def test_the_stream_reports_a_change() -> None:
    cookies = await sync_to_async(sign_in)()
    opened = asyncio.Event()
    waiting = asyncio.create_task(first_event(cookies, notifier.version("alice"), opened))
    await asyncio.wait_for(opened.wait(), LONG)
    assert not waiting.done()
    notifier.notify(["alice"])
    event = await waiting
    assert event.startswith(f"id: {notifier.version('alice')}\n") and event.endswith("\n\n")


@pytest.mark.django_db(transaction=True)
async def test_the_stream_needs_a_login() -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=application), base_url="http://carme.example:8443"
    ) as client:
        answer = await client.get("/updates/", headers={"x-forwarded-proto": "https"})
    assert answer.status_code == 302 and "/accounts/login/" in answer.headers["location"]


@pytest.mark.django_db(transaction=True)
def test_the_sync_starts_what_was_requested_and_follows_it(broker: FakeBroker, hub: FakeHub) -> None:
    """What an earlier process left undone comes first, then what pages and the broker report."""
    alice = User.objects.create_user("alice", password=PASSWORD)
    options = {"image": "torch", "minutes": 60, "title": "Left undone"}
    Session.objects.create(name="s0123abcd", owner=alice, options=options)
    with syncing():
        until(lambda: ("alice", "s0123abcd") in hub.servers)
        for state in ("queued", "starting", "ready", "ended"):
            broker.publish(make_session("s0123abcd", state, ending="finished" if state == "ended" else None))
            until(lambda state=state: Session.objects.get().state == state)
    assert len([path for path, _ in hub.called("POST") if "servers" in path]) == 2, "404, then the start"


@pytest.mark.django_db(transaction=True)
def test_one_session_is_synced_by_one_thread_at_a_time(
    broker: FakeBroker, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = User.objects.create_user("alice", password=PASSWORD)
    for name in ("s0123abcd", "s0123abce"):
        Session.objects.create(name=name, owner=alice, options={"image": "torch", "minutes": 60})
    inside: list[str] = []
    polls, go_on = threading.Semaphore(0), threading.Event()

    def tend(name: str) -> None:
        inside.append(name)
        if name == "s0123abcd":
            go_on.wait(LONG)
        raise RuntimeError("this ends only itself")

    monkeypatch.setattr(broker_sync, "tend_named", tend)
    monkeypatch.setattr(broker_sync, "PAUSE", 0.01)
    due = broker_sync.due_sessions
    monkeypatch.setattr(broker_sync, "due_sessions", lambda: polls.release() or due())
    with syncing():
        until(lambda: {"s0123abcd", "s0123abce"} <= set(inside))
        for _ in range(5):
            assert polls.acquire(timeout=LONG)
        assert inside.count("s0123abcd") == 1
        go_on.set()
        until(lambda: inside.count("s0123abcd") > 1)


def test_a_second_sync_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokerSync, "start", lambda self: pytest.fail("it has begun"))
    with (folder / "state/sync.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="already runs for this site"):
            call_command("sync")


@contextmanager
def syncing() -> Iterator[None]:
    """A running `carme-portal sync`, which leaves no connection to the tests' database behind."""
    sync = BrokerSync()
    with patch.object(broker_sync, "WAIT", 0.1):  # its end waits for the broker's answer
        sync.start()
        try:
            yield
        finally:
            sync.stop()
            sync.wait()
            for thread in sync.threads:
                thread.join(LONG)
            connection.close()


def until(holds) -> None:
    while not holds():
        threading.Event().wait(0.01)
