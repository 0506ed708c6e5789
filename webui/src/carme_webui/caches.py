"""What many pages have in common, in Django's cache."""

import hashlib
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from django.core.cache import caches
from django.utils.translation import get_language

from carme_webui.notifier import notifier

__all__ = ["SHARED_SECONDS", "cache_key", "cached", "shared"]

T = TypeVar("T")

#: For how long pages show what the database says to everybody alike.
SHARED_SECONDS = 2.0


def shared(name: str, query: Callable[[], T]) -> T:
    """What the database says to everybody alike.

    It is queried again as soon as all pages were notified of a change (`Notifier.notify_all`), and after
    SHARED_SECONDS. Nothing that depends on who reads belongs here.

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
