"""What many pages have in common, in Django's cache."""

import hashlib
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.cache.backends.locmem import LocMemCache
from django.utils.translation import get_language

from carme_webui.notifier import notifier

__all__ = ["SHARED_SECONDS", "DerivedValues", "ObjectCache", "cache_key", "cached", "derived", "shared"]

T = TypeVar("T")
S = TypeVar("S")

#: For how long pages show what the database says to everybody alike.
SHARED_SECONDS = 2.0


class ObjectCache(LocMemCache):
    """Django's cache in a process's memory, which returns the very objects that were put there.

    LocMemCache pickles them and makes them anew for each page. With it the p95 of a calendar of 5,000 nodes
    is 5.2 s and that of a dashboard 4.4 s, with this one both are 0.15 s (`./test bench portal --nodes 5000
    --current 20000 --without object-cache`, 28 November 2026, AMD EPYC, 2 cores). Who takes something from
    here may not change it.
    """

    # What Django's types leave out.
    _cache: Any
    _lock: Any
    _has_expired: Any
    _set: Any
    _delete: Any

    def get(self, key: Any, default: Any = None, version: int | None = None) -> Any:
        """What lies under the key, else the default."""
        key = self.make_and_validate_key(key, version=version)
        with self._lock:
            if self._has_expired(key):
                self._delete(key)
                return default
            self._cache.move_to_end(key, last=False)
            return self._cache[key]

    def set(self, key: Any, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> None:
        """Put it there for so many seconds."""
        key = self.make_and_validate_key(key, version=version)
        with self._lock:
            self._set(key, value, timeout)

    def add(self, key: Any, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        """Put it there unless there is something; whether it was put."""
        key = self.make_and_validate_key(key, version=version)
        with self._lock:
            if not self._has_expired(key):
                return False
            self._set(key, value, timeout)
            return True

    def incr(self, key: Any, delta: int = 1, version: int | None = None) -> int:
        """Add to the number under the key, which stays as long as before; ValueError if there is none."""
        key = self.make_and_validate_key(key, version=version)
        with self._lock:
            if self._has_expired(key):
                self._delete(key)
                raise ValueError(f"Key {key!r} not found")
            self._cache[key] += delta
            self._cache.move_to_end(key, last=False)
            return int(self._cache[key])


@dataclass(slots=True)
class _Derived:
    """A value, how it was made, and whether somebody requested it."""

    make: Callable[[Any], Any]
    value: Any
    is_used: bool = False


class DerivedValues:
    """What is worked out of objects that nobody changes, such as a snapshot of the cluster.

    It is made once for each object and key, and forgotten with the object: no value may refer to that.

    Large sites need it: with 5,000 nodes the p95 of a calendar is 217 ms without it and 152 ms with it, that
    of a dashboard 165 and 150 ms (`./test bench portal --nodes 5000 --current 20000 --without derived`,
    28 November 2026, AMD EPYC, 2 cores). With 250 nodes there is no difference.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[Hashable, _Derived]] = {}

    def __len__(self) -> int:
        """How many objects have derived values."""
        return len(self._values)

    def get(self, source: S, key: Hashable, make: Callable[[S], T]) -> T:
        """What was made of an object; what is missing is made, by two threads at a time at worst.

        Args:
            source: The object, which must take weak references.
            key: Names what is made. Whatever `make` reads besides the object belongs into it.
            make: Makes it of the object, or later of another one (`renew`).
        """
        found = self._derived(source, key, make)
        found.is_used = True
        return cast(T, found.value)

    def renew(self, before: object, source: object) -> None:
        """Make of an object what was requested from its predecessor, and of what was made of that."""
        for key, earlier in list(self._values.get(id(before), {}).items()):
            if earlier.is_used:
                value = self._derived(source, key, earlier.make)
                self.renew(earlier.value, value.value)

    def _derived(self, source: S, key: Hashable, make: Callable[[S], Any]) -> _Derived:
        number = id(source)
        values = self._values.get(number)
        if values is None:
            # Forgotten before another object can have this number.
            weakref.finalize(source, self._values.pop, number, None).atexit = False
            values = self._values.setdefault(number, {})
        if key not in values:
            values[key] = _Derived(make, make(source))
        return values[key]


derived = DerivedValues()
"""The derived values of this process."""


def shared(name: str, query: Callable[[], T]) -> T:
    """What the database says to everybody alike.

    It is queried again as soon as all pages were notified of a change (`Notifier.notify_all`), and after
    SHARED_SECONDS. Nothing that depends on the reader belongs here.

    Args:
        name: Names the question.
        query: Asks the database.
    """
    # The version is that of before the query: a change meanwhile makes the result old.
    key = cache_key(name, notifier.common_version())
    return cached("pages", key, query, SHARED_SECONDS)


def cached(alias: str, key: str, make: Callable[[], T], seconds: float) -> T:
    """What one of Django's caches has under a key; what it lacks is made.

    Args:
        alias: The cache's name in the settings.
        make: Makes it; not called while it is there.
        seconds: For how long it stays.
    """
    return cast(T, caches[alias].get_or_set(key, make, seconds))


def cache_key(name: str, *content: Hashable) -> str:
    """A key for what is made of this content, in the language that is active."""
    text = repr((get_language(), *content))
    return f"{name}:{hashlib.sha256(text.encode()).hexdigest()}"
