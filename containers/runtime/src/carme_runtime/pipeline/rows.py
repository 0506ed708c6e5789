"""Which rows of a replica's batch a micro-batch has, for layers that keep something for each row."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_running: ContextVar[range | None] = ContextVar("rows", default=None)


@contextmanager
def running(rows: range) -> Iterator[None]:
    """What runs here is for these rows."""
    token = _running.set(rows)
    try:
        yield
    finally:
        _running.reset(token)


def current() -> range | None:
    """The rows of what runs; None: it is no part of a batch, but is measured."""
    return _running.get()
