"""Tensors of PyTorch and numbers as messages between stages."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from carme_runtime.pipeline import messages
from carme_runtime.pipeline.messages import room

__all__ = ["pack", "room", "unpack"]

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
_REMEDY = "Give pipeline() an example that is as large as the largest batch."


def pack(memory: Any, parts: Sequence[Any], title: str) -> int:
    """Write a message of tensors, numbers and None; its size. See `pipeline.messages.pack`."""
    return messages.pack(memory, [_part(part) for part in parts], title, _REMEDY)


def unpack(memory: Any, count: int) -> list[Any]:
    """The parts of a message; tensors lie in its memory."""
    found = messages.unpack(memory, count, lambda _, type, elements: elements * _TYPES[type].itemsize)
    return [_tensor(part) if isinstance(part, messages.Received) else part for part in found]


def _part(value: Any) -> messages.Part | int | None:
    if not isinstance(value, torch.Tensor):
        return None if value is None else int(value)
    size = value.numel() * value.element_size()
    return messages.Part(_TYPES.index(value.dtype), value.shape, size, partial(_write, value))


def _write(tensor: torch.Tensor, memory: Any) -> None:
    torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _tensor(part: messages.Received) -> torch.Tensor:
    dtype = _TYPES[part.type]
    if not len(part.memory):
        return torch.empty(part.shape, dtype=dtype)
    return torch.from_numpy(part.memory).view(dtype).view(part.shape)
