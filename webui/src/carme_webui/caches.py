"""What is the same for many pages, and is made once for them."""

import time
from collections.abc import Callable
from functools import wraps
from operator import is_
from typing import Generic, ParamSpec, TypeVar

from django.utils.translation import get_language

from carme_webui.notifier import notifier

__all__ = ["Cached", "cached_by_arguments"]

T = TypeVar("T")
Given = ParamSpec("Given")


class Cached(Generic[T]):
    """What the database says to everybody alike; to be called for it, and not to be changed.

    It is asked again as soon as one of the portal's processes has told all pages of something new
    (`carme_webui.notifier`), and after `seconds`, so that what anybody else wrote is seen soon. Nothing that
    depends on who reads belongs here.

    Args:
        ask: Asks the database.
    """

    #: For how long an answer holds.
    seconds = 2.0

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        # The version of the news, until when it holds, and what was said.
        self._known: tuple[str, float, T] | None = None

    def __call__(self) -> T:
        version, now = notifier.common_version(), time.monotonic()
        known = self._known
        if known is None or known[0] != version or now >= known[1]:
            # The version is that of before the question: what is told meanwhile makes it old.
            self._known = known = version, now + self.seconds, self._ask()
        return known[2]


def cached_by_arguments(function: Callable[Given, T]) -> Callable[Given, T]:
    """Have a function of what pages share, such as the picture of the cluster, called once for them.

    For each language the result of the very same objects that were given last is remembered; it is not to be
    changed. Nothing that belongs to one user may be given.
    """
    last: dict[str | None, tuple[tuple[object, ...], T]] = {}

    @wraps(function)
    def call(*given: Given.args, **named: Given.kwargs) -> T:
        assert not named, "given by name, it is not compared"
        language = get_language()
        known = last.get(language)
        if known is None or len(known[0]) != len(given) or not all(map(is_, known[0], given)):
            last[language] = known = given, function(*given, **named)
        return known[1]

    return call
