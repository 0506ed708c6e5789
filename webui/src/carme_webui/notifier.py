"""Notifies open pages that something of their owner's has changed, in all processes of the portal (Redis)."""

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import redis
import redis.asyncio
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.client import PubSub
from redis.retry import Retry

__all__ = ["Notifier", "SessionRequests", "notifier", "read_versions_once", "redis_url"]

logger = logging.getLogger(__name__)

#: A hash with the number of changes of each user, of what all see, and of the bookings.
VERSIONS = "carme:portal:versions"
#: The channel with the names of those whose version has changed, as a list in JSON.
CHANGES = "carme:portal:changes"
#: The channel on which pages wake `carme-portal sync`.
SESSIONS = "carme:portal:sessions"
#: Fields that are not accounts' names: what all see, the bookings, and a word that differs after Redis has
#: lost the hash.
ALL, BOOKINGS, EPOCH = "*", "*bookings", "*epoch"
#: Seconds after which Redis is given up for this request.
PATIENCE = 1.0
#: While Redis is away, open pages look for changes once in so many seconds.
AWAY_SECONDS = 3.0
#: Seconds between two tries to subscribe again.
PAUSE = 0.5
#: Seconds between two checks whether Redis is back; meanwhile nobody else waits for it.
RETRY_SECONDS = 1.0


def redis_url(address: str) -> str:
    """`redis` in `[portal]`, which is written as Celery has it, as the library `redis` has it."""
    return address.replace("redis+socket://", "unix://", 1)


class Notifier:
    """What has changed for whom.

    A version is a word that differs from the earlier one as soon as there is something new. Redis counts the
    changes of each user, so that a page and a stream of events can compare versions although different
    processes made them. Redis's channel wakes the streams. While Redis is away, versions change every few
    seconds: open pages then look for changes, and nothing fails. After one failure only a thread of its own
    asks Redis, until it answers again; it then reports a change for all, as nobody knows what was missed.

    Args:
        address: Where Redis is, as in `[portal]`; `memory://`: nowhere.
    """

    def __init__(self, address: str) -> None:
        self._url = redis_url(address) if address != "memory://" else ""
        self._client: redis.Redis | None = None
        if self._url:
            self._client = redis.Redis.from_url(
                self._url,
                decode_responses=True,
                socket_timeout=PATIENCE,
                socket_connect_timeout=PATIENCE,
                # A connection from before a restart of Redis fails once; a Redis that hangs hangs twice.
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        self._away = False
        self._lock = threading.Lock()
        self._listeners: WeakKeyDictionary[asyncio.AbstractEventLoop, _Listener] = WeakKeyDictionary()

    def version(self, user: str) -> str:
        """What this user's pages show when they are made now."""
        return self._version(EPOCH, ALL, user)

    def common_version(self) -> str:
        """What all pages show alike when they are made now."""
        return self._version(EPOCH, ALL)

    def bookings_version(self) -> str:
        """What bookings there are; it wakes nobody."""
        return self._version(EPOCH, BOOKINGS)

    @contextlib.contextmanager
    def reading_once(self) -> Iterator[None]:
        """In this block versions are read from Redis once, and again after a change that is reported in it.

        What others change meanwhile makes what is cached or shown for the earlier version old, as it should.
        """
        token = _read_before.set({})
        try:
            yield
        finally:
            _read_before.reset(token)

    def count_booking(self) -> None:
        """A booking was made, changed or removed."""
        _forget_versions()
        with self._survived():
            if self._client:
                self._reachable.hincrby(VERSIONS, BOOKINGS, 1)

    def notify(self, users: Iterable[str]) -> None:
        """Something of these users has changed. Any thread may say so."""
        self._notify(sorted(set(users)))

    def notify_all(self) -> None:
        """Something that all see has changed."""
        self._notify([ALL])

    def wake_sync(self) -> None:
        """A session is to be started or stopped."""
        with self._survived():
            if self._client:
                self._reachable.publish(SESSIONS, "")

    def session_requests(self) -> "SessionRequests":
        """What `wake_sync` wakes."""
        return SessionRequests(self._client)

    def redis_answers(self) -> bool:
        """Whether Redis is there."""
        with self._survived():
            return self._client is not None and bool(self._reachable.ping())
        return False

    def _notify(self, names: list[str]) -> None:
        _forget_versions()
        if not names or not self._client:
            return
        with self._survived():
            self._count(self._reachable, names)

    def _count(self, client: redis.Redis, names: list[str]) -> None:
        with client.pipeline(transaction=True) as pipeline:
            for name in names:
                pipeline.hincrby(VERSIONS, name, 1)
            pipeline.publish(CHANGES, json.dumps(names))
            pipeline.execute()

    def _version(self, *fields: str) -> str:
        with self._survived():
            if self._client:
                known = _read_before.get()
                if known is None:
                    return _joined(self._read(fields))
                if any(field not in known for field in fields):
                    # What else the page may need comes by the same way.
                    names = sorted({ALL, BOOKINGS, *fields} - {EPOCH})
                    known.update(zip((EPOCH, *names), self._read([EPOCH, *names]), strict=True))
                return _joined([known[field] for field in fields])
        return _version_while_away(fields[-1])

    def _read(self, fields: Iterable[str]) -> list[str | None]:
        """These fields of the hash; the first one is EPOCH."""
        found = cast(list[str | None], self._reachable.hmget(VERSIONS, list(fields)))
        if found[0] is None:
            self._reachable.hsetnx(VERSIONS, EPOCH, secrets.token_hex(4))
            found = cast(list[str | None], self._reachable.hmget(VERSIONS, list(fields)))
        return found

    @property
    def _reachable(self) -> redis.Redis:
        """The client; raises redis.ConnectionError while Redis is known not to answer."""
        if self._client is None or self._away:
            raise redis.ConnectionError("It did not answer a moment ago.")
        return self._client

    @contextlib.contextmanager
    def _survived(self) -> Iterator[None]:
        """Go on without Redis where it does not answer, which is logged once."""
        try:
            yield
        except redis.RedisError as error:
            with self._lock:
                if self._away:
                    return
                self._away = True
            logger.warning("Redis does not answer. Open pages look for changes by themselves: %s", error)
            threading.Thread(target=_until_back, args=(ref(self),), name="redis", daemon=True).start()

    def _is_back(self) -> bool:
        """Whether Redis answers and takes changes again."""
        client = cast(redis.Redis, self._client)
        try:
            client.ping()
            # Those whom the report below wakes must not learn that Redis is away.
            self._away = False
            self._count(client, [BOOKINGS, ALL])
        except BaseException as error:
            self._away = True
            if not isinstance(error, redis.RedisError):
                raise
            return False
        return True

    async def wait(self, user: str, seen: str, seconds: float) -> str:
        """The version, as soon as it differs from the one that was seen; after `seconds` at the latest."""
        loop = asyncio.get_running_loop()
        if loop not in self._listeners:
            self._listeners[loop] = _Listener(self._url)
        listener, end = self._listeners[loop], loop.time() + seconds
        with listener.waiting(user) as changed:
            # The subscription is there before the version is read: no change is missed between the two.
            await listener.begin()
            while True:
                changed.clear()
                version, left = await listener.version(user), end - loop.time()
                if version != seen or left <= 0:
                    return version
                answers = listener.hears and not version.startswith(_AWAY)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left if answers else min(left, AWAY_SECONDS)):
                        await changed.wait()


class SessionRequests:
    """Waits until a session is to be started or stopped; for one thread."""

    def __init__(self, client: redis.Redis | None) -> None:
        self._client = client
        self._channel: PubSub | None = None

    def wait(self, seconds: float) -> None:
        """Until that is so, for so many seconds at most; while Redis is away, for all of them."""
        if self._client is None:
            time.sleep(seconds)
            return
        try:
            channel = self._channel
            if channel is None:
                self._channel = channel = self._client.pubsub(ignore_subscribe_messages=True)
                channel.subscribe(SESSIONS)
            channel.get_message(timeout=seconds)
        except redis.RedisError:
            self._channel = None
            time.sleep(seconds)


class _Listener:
    """Follows the channel for all who wait in one event loop, by one connection to Redis."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._client = self._connection(socket_timeout=PATIENCE) if url else None
        #: Whether the channel is subscribed to.
        self.hears = False

    def _connection(self, **options: Any) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(
            self._url,
            decode_responses=True,
            socket_connect_timeout=PATIENCE,
            retry=AsyncRetry(NoBackoff(), 0),
            **options,
        )

    @contextlib.contextmanager
    def waiting(self, user: str) -> Iterator[asyncio.Event]:
        """An event that is set when something has changed for this user."""
        event = asyncio.Event()
        self._waiting.setdefault(user, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[user].discard(event)
            if not self._waiting[user]:
                del self._waiting[user]

    async def begin(self) -> None:
        """Subscribe, if that was not done; returns also when it fails, and is then tried again."""
        if self._url and self._task is None:
            self._task = asyncio.create_task(self._follow())
        if self._task:
            await self._tried.wait()  # for PATIENCE at most

    async def version(self, user: str) -> str:
        """As `Notifier.version`."""
        if self._client and self.hears:
            with contextlib.suppress(redis.RedisError):
                found = await cast(Any, self._client.hmget(VERSIONS, [EPOCH, ALL, user]))
                _heed_cancellation()
                if found[0] is not None:
                    return _joined(found)
            _heed_cancellation()
        return _version_while_away(user)

    async def _follow(self) -> None:
        while True:
            try:
                async for names in self._changes():
                    self._wake(names)
            except (redis.RedisError, OSError):
                pass  # the notifier's requests log it
            except Exception:
                logger.exception("Changes could not be followed; the next try follows")
            finally:
                self.hears = False
                self._tried.set()
            _heed_cancellation()
            self._wake([ALL])
            await asyncio.sleep(PAUSE)

    async def _changes(self) -> AsyncIterator[list[str]]:
        """The names whose version has changed; first all: nobody knows what was missed before."""
        async with self._connection() as client, client.pubsub() as channel:
            # The connection itself has no limit of time, as hours may pass between two changes.
            async with asyncio.timeout(PATIENCE):
                await channel.subscribe(CHANGES)
                while await channel.get_message(timeout=PATIENCE) is None:
                    pass
                await cast(Any, client.hsetnx(VERSIONS, EPOCH, secrets.token_hex(4)))
                if self._tried.is_set():
                    await cast(Any, client.hincrby(VERSIONS, ALL, 1))
            _heed_cancellation()
            self.hears = True
            self._tried.set()
            yield [ALL]
            async for message in channel.listen():
                if message["type"] == "message":
                    yield json.loads(message["data"])

    def _wake(self, names: list[str]) -> None:
        users = list(self._waiting) if ALL in names else names
        for user in users:
            for event in self._waiting.get(user, ()):
                event.set()


def _heed_cancellation() -> None:
    """End a task that was cancelled: waiting with a limit, as redis-py does, can swallow that (bpo-37658)."""
    if (task := asyncio.current_task()) and task.cancelling():
        raise asyncio.CancelledError


#: What was read of the hash while a request is answered (`Notifier.reading_once`); None: nothing is kept.
_read_before: ContextVar[dict[str, str | None] | None] = ContextVar("read_before", default=None)


def _forget_versions() -> None:
    if known := _read_before.get():
        known.clear()


def _joined(fields: list[str | None]) -> str:
    return "-".join(field or "0" for field in fields)


_AWAY = "away-"


def _version_while_away(user: str) -> str:
    """Changes every few seconds, for different users at different times."""
    shift = zlib.crc32(user.encode()) % 1000 / 1000
    return f"{_AWAY}{time.time() / AWAY_SECONDS + shift:.0f}"


def _until_back(notifier: "ReferenceType[Notifier]") -> None:
    """Returns when Redis answers again, or when nobody needs the notifier any more."""
    while True:
        time.sleep(RETRY_SECONDS)
        found = notifier()
        try:
            if found is None or found._is_back():
                return
        except Exception:
            logger.exception("Redis could not be looked for; the next try follows")
        del found


notifier = Notifier(settings.SITE.portal.redis)
"""The notifier of this site."""


def read_versions_once(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware: a page reads versions from Redis once, however many of its parts are cached by them."""

    def middleware(request: HttpRequest) -> HttpResponse:
        with notifier.reading_once():
            return get_response(request)

    return middleware
