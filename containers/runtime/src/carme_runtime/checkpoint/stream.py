"""A state as a stream of bytes, of which each rank holds a range, and the structure around its tensors."""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import hashlib
import io
from dataclasses import dataclass
from typing import Any

import torch

from carme_runtime.collectives.errors import InvalidCall

_ALIGNMENT = 64  # bytes; where tensors begin
_TENSOR = "\0tensor"  # the key of what stands for a tensor


@dataclass(frozen=True)
class Layout:
    """Where each tensor is in the stream."""

    tensors: list[tuple[list[int], str, int]]  # shape, type, first byte
    size: int  # bytes of the stream

    def digest(self) -> str:
        """The same for the same layout."""
        return hashlib.sha256(repr((self.tensors, self.size)).encode()).hexdigest()


def take_apart(state: Any) -> tuple[bytes, Layout, list[torch.Tensor]]:
    """The structure of a state without its tensors, their places, and the tensors.

    Raises:
        InvalidCall: There is something in it that could not be loaded without running code from the file.
    """
    tensors: list[torch.Tensor] = []
    structure = _without_tensors(state, tensors)
    places, end = [], 0
    for tensor in tensors:
        places.append((list(tensor.shape), str(tensor.dtype).removeprefix("torch."), end))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    packed = pack(structure)
    try:
        unpack(packed)
    except Exception as error:
        raise InvalidCall(
            "A checkpoint takes tensors, numbers, strings, and lists, tuples and dictionaries of them: "
            f"{str(error).splitlines()[0]}",
            "Convert what is something else.",
        ) from None
    return packed, Layout(places, end), tensors


def put_together(packed: bytes, layout: Layout, stream: torch.Tensor) -> Any:
    """The state whose tensors are in `stream`, as copies."""
    tensors = []
    for shape, name, begin in layout.tensors:
        dtype = getattr(torch, name)
        count = torch.Size(shape).numel()
        flat = stream[begin : begin + count * dtype.itemsize].view(dtype)
        tensors.append(flat.view(shape).clone())
    return _with_tensors(unpack(packed), tensors)


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first and the last byte but one of what a rank holds of a stream."""
    blocks = size // _ALIGNMENT
    return blocks * rank // ranks * _ALIGNMENT, blocks * (rank + 1) // ranks * _ALIGNMENT


def copy_range(layout: Layout, tensors: list[torch.Tensor], begin: int, end: int, room: torch.Tensor) -> None:
    """Copy bytes `begin` to `end` of the stream into `room`, which is on the host."""
    room.zero_()
    for (_, _, first), tensor in zip(layout.tensors, tensors, strict=True):
        size = tensor.numel() * tensor.element_size()
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            room[low - begin : high - begin].copy_(flat[low - first : high - first])


def pack(content: Any) -> bytes:
    """Bytes from which `unpack` makes it again."""
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()


def unpack(packed: bytes) -> Any:
    """What was packed. No code that the bytes might name is run."""
    return torch.load(io.BytesIO(packed), weights_only=True)


def _without_tensors(state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        if state.layout is not torch.strided or not _is_ordinary(state):
            raise InvalidCall(
                f"A checkpoint cannot take a tensor of type {type(state).__name__}, layout {state.layout}.",
                "Save the whole state, dense and the same on all ranks.",
            )
        tensors.append(state)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(state, dict):
        return {key: _without_tensors(value, tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(value, tensors) for value in state)
    return state


def _with_tensors(structure: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(structure, dict):
        if _TENSOR in structure:
            return tensors[structure[_TENSOR]]
        return {key: _with_tensors(value, tensors) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(_with_tensors(value, tensors) for value in structure)
    return structure


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it is not in parts on several ranks, or otherwise more than it shows."""
    name = "__torch_dispatch__"
    return getattr(type(tensor), name) is getattr(torch.Tensor, name)
