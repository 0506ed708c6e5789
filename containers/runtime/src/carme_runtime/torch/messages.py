"""Tensors and numbers as messages of mailboxes: a table of what there is, then the tensors' bytes."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Sequence
from typing import Any

import torch

from carme_runtime.collectives.errors import InvalidCall

_TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_NOTHING, _NUMBER, _TENSOR = range(3)
_MOST_DIMENSIONS = 8
_COLUMNS = 4 + _MOST_DIMENSIONS  # what it is, type or number, dimensions, (free), sizes
_ALIGNMENT = 64


def room(sizes: Sequence[float]) -> int:
    """Bytes of a message of tensors of these sizes."""
    return _table_bytes(len(sizes)) + sum(_aligned(int(-(-size // 1))) for size in sizes)


def pack(memory: Any, parts: Sequence[Any], what: str) -> int:
    """Write a message; its size. Raises InvalidCall where it has no room: `what` says what it is."""
    flat = torch.from_numpy(memory)
    table = flat[: _table_bytes(len(parts))].view(torch.int64).view(-1)
    rows, at = [], _table_bytes(len(parts))
    for part in parts:
        row = [_NOTHING] + [0] * (_COLUMNS - 1)
        if isinstance(part, torch.Tensor):
            size = part.numel() * part.element_size()
            if at + size > len(flat) or part.dim() > _MOST_DIMENSIONS:
                raise InvalidCall(
                    f"A value of shape {list(part.shape)} has no room in {what}.",
                    "Give pipeline() an example that is as large as the largest batch.",
                )
            row[:3] = [_TENSOR, _TYPES.index(part.dtype), part.dim()]
            row[4 : 4 + part.dim()] = part.shape
            if size:
                flat[at : at + size].view(part.dtype).view(part.shape).copy_(part.detach())
            at += _aligned(size)
        elif part is not None:
            row[:2] = [_NUMBER, int(part)]
        rows.append(row)
    table[: len(rows) * _COLUMNS] = torch.tensor(rows, dtype=torch.int64).view(-1)
    return min(at, len(flat))


def unpack(memory: Any, count: int) -> list[Any]:
    """The parts of a message; tensors lie in its memory."""
    flat = torch.from_numpy(memory)
    table = flat[: _table_bytes(count)].view(torch.int64)[: count * _COLUMNS].view(count, _COLUMNS)
    parts: list[Any] = []
    at = _table_bytes(count)
    for row in table.tolist():
        if row[0] != _TENSOR:
            parts.append(row[1] if row[0] == _NUMBER else None)
            continue
        dtype, shape = _TYPES[row[1]], row[4 : 4 + row[2]]
        size = dtype.itemsize
        for each in shape:
            size *= each
        parts.append(
            flat[at : at + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
        )
        at += _aligned(size)
    return parts


def _table_bytes(count: int) -> int:
    return _aligned(8 * _COLUMNS * count)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
