"""NumPy arrays as messages between stages; the receiver knows their types."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from carme_runtime.pipeline import messages

_REMEDY = "Train with batches that are at most as large as the first one."


def pack(memory: Any, arrays: Sequence[Any], title: str) -> int:
    """Write a message of arrays, some of them perhaps None; its size. See `pipeline.messages.pack`."""
    parts = [
        None if array is None else messages.Part(0, array.shape, array.nbytes, partial(_write, array))
        for array in arrays
    ]
    return messages.pack(memory, parts, title, _REMEDY)


def unpack(memory: Any, types: Sequence[Any]) -> list[Any]:
    """Copies of the parts of a message, of these types."""
    found = messages.unpack(memory, len(types), lambda place, _, count: count * types[place].itemsize)
    return [
        _copied(part, dtype) if isinstance(part, messages.Received) else None
        for part, dtype in zip(found, types, strict=True)
    ]


def _write(array: Any, memory: Any) -> None:
    memory[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _copied(part: messages.Received, dtype: Any) -> Any:
    array = np.empty(part.shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = part.memory
    return array
