"""A state as a stream of bytes, of which each rank holds a range, and the structure around its tensors.

Tensors are those of PyTorch, and NumPy arrays, for which PyTorch need not be installed.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import hashlib
import io
import math
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from carme_runtime.checkpoint.states import is_divided
from carme_runtime.collectives.errors import InvalidCall

_ALIGNMENT = 64  # bytes; where tensors begin
_TENSOR, _ARRAY = "\0tensor", "\0array"  # the keys of what stands for a tensor, and for a NumPy array
_OF_TORCH = b"PK"  # how what torch.save has packed begins
_PICKLE = 4  # of its protocols


@dataclass(frozen=True)
class Layout:
    """Where each tensor is in the stream."""

    tensors: list[tuple[list[int], str, int]]  # shape, type, first byte
    size: int  # bytes of the stream

    def digest(self) -> str:
        """The same for the same layout."""
        return hashlib.sha256(repr((self.tensors, self.size)).encode()).hexdigest()


def take_apart(state: Any) -> tuple[bytes, Layout, list[Any]]:
    """The structure of a state without its tensors, their places, and the tensors.

    Raises:
        InvalidCall: There is something in it that could not be loaded without running code from the file.
    """
    tensors: list[Any] = []
    structure = _without_tensors(state, tensors)
    places, end = [], 0
    for tensor in tensors:
        places.append((list(tensor.shape), str(tensor.dtype).removeprefix("torch."), end))
        end += -(-_size(tensor) // _ALIGNMENT) * _ALIGNMENT
    try:
        packed = pack(structure)
        unpack(packed)
    except Exception as error:
        raise InvalidCall(
            "A checkpoint takes tensors, numbers, strings, and lists, tuples and dictionaries of them: "
            f"{str(error).splitlines()[0]}",
            "Convert what is something else.",
        ) from None
    return packed, Layout(places, end), tensors


def put_together(packed: bytes, layout: Layout, stream: np.ndarray) -> Any:
    """The state whose tensors are in `stream`, as copies."""
    return with_tensors(unpack(packed), layout, stream)


def numbers_in(structure: Any) -> list[int]:
    """The numbers of the tensors in a structure, or a part of it."""
    if isinstance(structure, dict):
        if found := [structure[key] for key in (_TENSOR, _ARRAY) if key in structure]:
            return found
        structure = list(structure.values())
    if isinstance(structure, list | tuple):
        return [number for value in structure for number in numbers_in(value)]
    return []


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first and the last byte but one of what a rank holds of a stream."""
    blocks = size // _ALIGNMENT
    return blocks * rank // ranks * _ALIGNMENT, blocks * (rank + 1) // ranks * _ALIGNMENT


def copy_range(layout: Layout, tensors: list[Any], begin: int, end: int, room: np.ndarray) -> None:
    """Copy bytes `begin` to `end` of the stream into `room`. All ranks call it together."""
    room[:] = 0
    for (_, _, first), tensor in zip(layout.tensors, tensors, strict=True):
        # Also where none of its bytes are this rank's: the ranks put it together together.
        whole = tensor.detach().full_tensor() if is_divided(tensor) else tensor
        size = _size(whole)
        low, high = max(begin, first), min(end, first + size)
        if low >= high:
            continue
        if isinstance(whole, np.ndarray):
            flat = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
            room[low - begin : high - begin] = flat[low - first : high - first]
        else:
            import torch

            flat = whole.detach().contiguous().view(-1).view(torch.uint8)
            torch.from_numpy(room)[low - begin : high - begin].copy_(flat[low - first : high - first])


def pack(content: Any) -> bytes:
    """Bytes from which `unpack` makes it again."""
    if "torch" not in sys.modules:
        return pickle.dumps(content, _PICKLE)
    import torch

    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()


def unpack(packed: bytes) -> Any:
    """What was packed. No code that the bytes might name is run."""
    if not packed.startswith(_OF_TORCH):
        return _Plain(io.BytesIO(packed)).load()
    try:
        import torch
    except ModuleNotFoundError:
        raise InvalidCall(
            "The checkpoint was written with PyTorch, which is not installed here.", "Load it where it is."
        ) from None
    return torch.load(io.BytesIO(packed), weights_only=True)


class _Plain(pickle.Unpickler):
    """Makes what needs no name: numbers, strings, lists, tuples and dictionaries."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is none of them.")


def _size(tensor: Any) -> int:
    """In bytes."""
    return tensor.nbytes if isinstance(tensor, np.ndarray) else tensor.numel() * tensor.element_size()


def _without_tensors(state: Any, tensors: list[Any]) -> Any:
    if isinstance(state, np.ndarray):
        if state.dtype.hasobject or state.dtype.names:
            raise InvalidCall(
                f"A checkpoint cannot take an array of {state.dtype}.", "Save arrays of numbers."
            )
        tensors.append(state)
        return {_ARRAY: len(tensors) - 1}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        if state.layout is not torch.strided or not (_is_ordinary(state) or is_divided(state)):
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


def with_tensors(structure: Any, layout: Layout, stream: np.ndarray, copies: bool = True) -> Any:
    """A structure, or a part of it, with its tensors: copies, or views of the stream."""
    if isinstance(structure, dict):
        if _TENSOR in structure:
            return _tensor(layout, structure[_TENSOR], stream, copies)
        if _ARRAY in structure:
            return _array(layout, structure[_ARRAY], stream, copies)
        return {key: with_tensors(value, layout, stream, copies) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(with_tensors(value, layout, stream, copies) for value in structure)
    return structure


def _tensor(layout: Layout, number: int, stream: np.ndarray, copies: bool) -> Any:
    import torch

    shape, name, begin = layout.tensors[number]
    dtype = getattr(torch, name)
    flat = torch.from_numpy(stream[begin : begin + math.prod(shape) * dtype.itemsize]).view(dtype)
    return flat.view(shape).clone() if copies else flat.view(shape)


def _array(layout: Layout, number: int, stream: np.ndarray, copies: bool) -> np.ndarray:
    shape, name, begin = layout.tensors[number]
    dtype = np.dtype(name)
    view = stream[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return view.copy() if copies else view


def _is_ordinary(tensor: Any) -> bool:
    """Whether it is not otherwise more than it shows."""
    torch = sys.modules["torch"]
    name = "__torch_dispatch__"
    return getattr(type(tensor), name) is getattr(torch.Tensor, name)
