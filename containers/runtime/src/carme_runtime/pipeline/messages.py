"""What messages between stages cost, and NumPy arrays as messages of mailboxes."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carme_runtime.collectives import Group, links
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Links

_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
_ALIGNMENT = 64
_MOST_DIMENSIONS = 8
_COLUMNS = 2 + _MOST_DIMENSIONS  # whether there is one, dimensions, sizes


def links_of(everyone: Group | None, rank: int, copying_us: Callable[[int], float]) -> Links:
    """What messages cost: by the runtime's file, by its measurement between nodes, or by copying here.

    Args:
        everyone: All ranks, who call this together; None: there is one.
        rank: This one; what rank 0 gets counts.
        copying_us: Microseconds that a message of so many bytes takes within the node.
    """
    file = os.environ.get(links.LINKS, "")
    if file and not links.to_be_measured():
        return Links(tuple(links.read(Path(file))), f"from {file}")
    times = everyone.measure_links() if everyone else []
    if times:
        return Links(tuple(times), "measured between nodes")
    if rank:
        return Links()
    return Links(tuple((size, copying_us(size)) for size in _SIZES), "copies in memory")


def room(sizes: Sequence[float]) -> int:
    """Bytes of a message of arrays of these sizes."""
    return _table_bytes(len(sizes)) + sum(_aligned(int(-(-size // 1))) for size in sizes)


def pack(memory: Any, parts: Sequence[Any], what: str) -> int:
    """Write a message of arrays, of which some may be None.

    Args:
        memory: Bytes, as an array.
        parts: The arrays; the receiver knows their types.
        what: The message's name.

    Returns:
        Its size.

    Raises:
        InvalidCall: It has no room.
    """
    table = memory[: _table_bytes(len(parts))].view(np.int64)[: len(parts) * _COLUMNS]
    rows = np.zeros((len(parts), _COLUMNS), np.int64)
    at = _table_bytes(len(parts))
    for row, part in zip(rows, parts, strict=True):
        if part is None:
            continue
        if at + part.nbytes > len(memory) or part.ndim > _MOST_DIMENSIONS:
            raise InvalidCall(
                f"A value of shape {list(part.shape)} has no room in {what}.",
                "Train with batches that are at most as large as the first one.",
            )
        row[0], row[1], row[2 : 2 + part.ndim] = 1, part.ndim, part.shape
        flat = np.ascontiguousarray(part).reshape(-1)
        memory[at : at + part.nbytes] = flat.view(np.uint8)
        at += _aligned(part.nbytes)
    table[:] = rows.reshape(-1)
    return min(at, len(memory))


def unpack(memory: Any, types: Sequence[Any]) -> list[Any]:
    """Copies of the parts of a message, of these types."""
    table = memory[: _table_bytes(len(types))].view(np.int64)[: len(types) * _COLUMNS]
    parts: list[Any] = []
    at = _table_bytes(len(types))
    for row, dtype in zip(table.reshape(-1, _COLUMNS).tolist(), types, strict=True):
        if not row[0]:
            parts.append(None)
            continue
        part = np.empty(row[2 : 2 + row[1]], dtype)
        part.reshape(-1).view(np.uint8)[:] = memory[at : at + part.nbytes]
        parts.append(part)
        at += _aligned(part.nbytes)
    return parts


def _table_bytes(count: int) -> int:
    return _aligned(8 * _COLUMNS * count)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
