"""What many pages have in common, in Django's cache."""

import hashlib
from collections.abc import Callable, Hashable
from typing import TypeVar

from django.core.cache import caches
from django.utils.translation import get_language

from carme_webui.notifier import notifier

__all__ = ["SHARED_SECONDS", "cache_key", "shared"]

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
    return caches["pages"].get_or_set(key, query, SHARED_SECONDS)


def cache_key(name: str, *content: Hashable) -> str:
    """A key for what is made of this content, in the language that is active."""
    text = repr((get_language(), *content))
    return f"{name}:{hashlib.sha256(text.encode()).hexdigest()}"
