"""One at a time: a background task that must not run twice at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.core.cache import cache

__all__ = ["alone"]


@contextmanager
def alone(name: str, seconds: float) -> Iterator[bool]:
    """Whether the caller is the only one doing `name` now, in all processes of the site.

    Args:
        name: What is done.
        seconds: After this time a holder counts as dead.
    """
    key = f"alone:{name}"
    mine = cache.add(key, True, timeout=seconds)
    try:
        yield mine
    finally:
        if mine:
            cache.delete(key)
