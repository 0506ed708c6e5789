"""Lists that come in parts."""

from collections.abc import Iterator
from typing import Any

from carme.client.connection import Connection

__all__ = ["items"]

PART = 200  # the most that the API sends at once


def items(connection: Connection, path: str, limit: int | None, **query: Any) -> Iterator[Any]:
    """All items of a list, newest first; at most `limit` of them. The next part is requested when needed."""
    cursor = None
    while limit is None or limit > 0:
        page = connection.ask("GET", path, limit=min(PART, limit or PART), cursor=cursor, **query)
        yield from page["items"]
        cursor = page["next"]
        if limit is not None:
            limit -= len(page["items"])
        if cursor is None:
            return
