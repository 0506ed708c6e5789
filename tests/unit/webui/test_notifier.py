"""Open pages learn of changes at once; the sync follows the broker by itself."""

import asyncio
import os
import signal
import threading
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from carme_webui.accounts.models import User
from carme_webui.asgi import application
from carme_webui.background import BackgroundTasks
from carme_webui.broker_sync import BrokerSync
from carme_webui.notifier import Notifier, notifier
from carme_webui.sessions.models import Session
from patience import HANG

from .conftest import PASSWORD, Browser, Never
from .fake_broker import FakeBroker, make_session
from .fake_hub import FakeHub

LONG = HANG


async def test_whoever_waits_is_woken_by_news_of_their_own() -> None:
    reported = Notifier()
    seen = reported.version("alice")
    waiting = asyncio.create_task(reported.wait("alice", seen, LONG))
    await asyncio.sleep(0)
    reported.notify(["bob"])
    await asyncio.sleep(0)
    assert not waiting.done()
    threading.Thread(target=reported.notify, args=(["alice"],)).start()
    assert await waiting != seen


async def test_what_came_before_is_not_missed() -> None:
    reported = Notifier()
    seen = reported.version("alice")
    reported.notify(["alice"])
    assert await reported.wait("alice", seen, LONG) != seen
    assert await reported.wait("alice", "", LONG) == reported.version("alice"), "also after a restart"


async def test_news_for_all_wake_all() -> None:
    shown = Notifier()
    waiting = [asyncio.create_task(shown.wait(user, shown.version(user), LONG)) for user in ("alice", "bob")]
    await asyncio.sleep(0)
    shown.notify_all()
    await asyncio.gather(*waiting)


async def test_waiting_ends_and_leaves_nothing_behind() -> None:
    reported = Notifier()
    seen = reported.version("alice")
    assert await reported.wait("alice", seen, 0.01) == seen
    cancelled = asyncio.create_task(reported.wait("alice", seen, LONG))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not reported._waiting


def test_errands_of_one_key_never_overlap_and_a_failure_ends_only_itself() -> None:
    background_tasks, inside, go_on = BackgroundTasks(), threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        go_on.wait(LONG)
        raise RuntimeError("this one fails")

    assert background_tasks.run("a", slow)
    assert inside.wait(LONG)
    assert not background_tasks.run("a", slow)
    other = threading.Event()
    assert background_tasks.run("b", other.set)
    assert other.wait(LONG)
    go_on.set()
    again = threading.Event()
    while not background_tasks.run("a", again.set):
        pass
    assert again.wait(LONG)


def test_errands_of_one_key_never_overlap_in_two_processes() -> None:
    mine, its = os.pipe()
    if (other := os.fork()) == 0:
        try:
            os.write(its, b"1" if BackgroundTasks(Never()).run("c", print) else b"0")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(mine, 1) == b"1"
        assert not BackgroundTasks().run("c", print)
        done = threading.Event()
        assert BackgroundTasks().run("d", done.set) and done.wait(LONG)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(mine)
        os.close(its)
    assert BackgroundTasks().run("c", print), "the dead hold nothing"


def sign_in() -> str:
    found = Browser()
    found.force_login(User.objects.create_user("alice", password=PASSWORD))
    return "; ".join(f"{name}={cookie.value}" for name, cookie in found.cookies.items())


async def first_event(cookies: str, seen: str, opened: asyncio.Event) -> str:
    """The first event of a stream of news, read as a browser reads it: while it is open."""
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
        if "event: news" in text and not found.done():
            found.set_result(text)

    headers = {"host": "carme.example:8443", "x-forwarded-proto": "https", "cookie": cookies}
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/news/",
        "query_string": f"seen={seen}".encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await asyncio.wait_for(application(scope, receive, send), LONG)
    return found.result()


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
        answer = await client.get("/news/", headers={"x-forwarded-proto": "https"})
    assert answer.status_code == 302 and "/accounts/login/" in answer.headers["location"]


@pytest.mark.django_db(transaction=True)
def test_the_sync_starts_what_was_requested_and_follows_it(broker: FakeBroker, hub: FakeHub) -> None:
    """The whole path in the server's process: what an earlier process left undone, then the broker's news."""
    alice = User.objects.create_user("alice", password=PASSWORD)
    options = {"image": "torch", "minutes": 60, "title": "Left undone"}
    Session.objects.create(name="s0123abcd", owner=alice, options=options)
    sync = BrokerSync()
    sync.start()
    try:
        until(lambda: ("alice", "s0123abcd") in hub.servers)
        for state in ("queued", "starting", "ready", "ended"):
            broker.tell(make_session("s0123abcd", state, ending="finished" if state == "ended" else None))
            until(lambda state=state: Session.objects.get().state == state)
    finally:
        sync.stop()
        for thread in threading.enumerate():
            if thread.name in ("follow", "tend"):
                thread.join(LONG)
        connection.close()
    assert len([path for path, _ in hub.called("POST") if "servers" in path]) == 2, "404, then the start"


def until(holds) -> None:
    while not holds():
        threading.Event().wait(0.01)
