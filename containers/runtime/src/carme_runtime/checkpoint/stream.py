"""A state as a stream of bytes, a range of it on each rank, and the structure around its tensors.

Tensors are those of PyTorch, and NumPy arrays, for which PyTorch need not be installed.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import bisect
import contextlib
import hashlib
import io
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from carme_runtime.checkpoint.states import is_divided
from carme_runtime.collectives.errors import InvalidCall

_ALIGNMENT = 64  # bytes; where tensors begin
_TENSOR, _ARRAY = "\0tensor", "\0array"  # the keys of what stands for a tensor, and for a NumPy array
_OF_TORCH = b"PK"  # how what torch.save has packed begins
_PICKLE = 4  # of its protocols
_PIECE = 4 << 20  # bytes that are copied at a time where memory is limited


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


class Stream:
    """The bytes of a state in one array, which pieces of them fill."""

    def __init__(self, packed: bytes, layout: Layout) -> None:
        self.packed, self.layout = packed, layout
        self.content = np.empty(layout.size, np.uint8)

    def put(self, begin: int, piece: np.ndarray) -> None:
        """These bytes of the stream begin there."""
        self.content[begin : begin + len(piece)] = piece


class Filling:
    """A state with tensors of its own, which pieces of the stream fill: nothing else has all the bytes.

    Args:
        packed: The structure.
        layout: Of all its tensors.
        own: Of the structure: what is wanted. There are no tensors for the rest.
    """

    def __init__(
        self,
        packed: bytes,
        layout: Layout,
        own: Callable[[Any], Any] = lambda structure: structure,
    ) -> None:
        self._layout = layout
        self._begins = [begin for _, _, begin in layout.tensors]
        self._flat: list[Any] = [None] * len(layout.tensors)  # the bytes of each
        self.state = _with(own(unpack(packed)), self._empty)

    def put(self, begin: int, piece: np.ndarray) -> None:
        """These bytes of the stream begin there."""
        end = begin + len(piece)
        for number in range(max(bisect.bisect_right(self._begins, begin) - 1, 0), len(self._begins)):
            first = self._begins[number]
            if first >= end:
                return
            if (flat := self._flat[number]) is None:
                continue
            low, high = max(begin, first), min(end, first + len(flat))
            if low < high:
                _copy(flat[low - first : high - first], piece[low - begin : high - begin])

    def _empty(self, kind: str, number: int) -> Any:
        shape, name, _ = self._layout.tensors[number]
        if kind == _ARRAY:
            array = np.empty(shape, np.dtype(name))
            self._flat[number] = array.reshape(-1).view(np.uint8)
            return array
        import torch

        tensor = torch.empty(shape, dtype=getattr(torch, name), device="cpu")
        self._flat[number] = tensor.view(-1).view(torch.uint8)
        return tensor


def numbers_in(structure: Any) -> list[int]:
    """The numbers of the tensors in a structure, or a part of it."""
    if isinstance(structure, dict):
        if found := [structure[key] for key in (_TENSOR, _ARRAY) if key in structure]:
            return found
        structure = list(structure.values())
    if isinstance(structure, list | tuple):
        return [number for value in structure for number in numbers_in(value)]
    return []


def as_tensors(structure: Any) -> Any:
    """The structure with tensors of PyTorch for NumPy arrays: a limit of memory can move those."""
    return _as(_TENSOR, structure)


def as_arrays(structure: Any) -> Any:
    """The structure with NumPy arrays for tensors of PyTorch, which may not be installed."""
    return _as(_ARRAY, structure)


def _as(kind: str, structure: Any) -> Any:
    return _with(structure, lambda _, number: {kind: number})


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first and the last byte but one of what a rank holds of a stream."""
    blocks = size // _ALIGNMENT
    return blocks * rank // ranks * _ALIGNMENT, blocks * (rank + 1) // ranks * _ALIGNMENT


def copy_range(layout: Layout, tensors: list[Any], begin: int, end: int, room: np.ndarray) -> None:
    """Copy bytes `begin` to `end` of the stream into `room`. All ranks call it together."""
    room[:] = 0
    for low, high, flat in _parts(layout, tensors, begin, end):
        _copy(room[low - begin : high - begin], flat)


def pieces(layout: Layout, tensors: list[Any], begin: int, end: int) -> Iterator[np.ndarray]:
    """Bytes `begin` to `end` of the stream, one piece after the other. All ranks go through them together."""
    at = begin
    for low, high, flat in _parts(layout, tensors, begin, end):
        if low > at:
            yield np.zeros(low - at, np.uint8)
        for cut in range(low, high, _PIECE):
            piece = np.empty(min(_PIECE, high - cut), np.uint8)
            _copy(piece, flat[cut - low : cut - low + len(piece)])
            yield piece
        at = high
    if at < end:
        yield np.zeros(end - at, np.uint8)


def _parts(layout: Layout, tensors: list[Any], begin: int, end: int) -> Iterator[tuple[int, int, Any]]:
    """What tensors have of bytes `begin` to `end`: from where to where in the stream, and the bytes."""
    for (_, _, first), tensor in zip(layout.tensors, tensors, strict=True):
        # Also where none of its bytes are this rank's: the ranks put it together together.
        whole = tensor.detach().full_tensor() if is_divided(tensor) else tensor
        size = _size(whole)
        low, high = max(begin, first), min(end, first + size)
        if low >= high:
            continue
        if isinstance(whole, np.ndarray):
            flat: Any = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
        else:
            import torch

            flat = whole.detach().contiguous().view(-1).view(torch.uint8)
        yield low, high, flat[low - first : high - first]


def _copy(into: Any, source: Any) -> None:
    """Copy bytes; one side or both may be a tensor's."""
    if isinstance(into, np.ndarray) and isinstance(source, np.ndarray):
        into[:] = source
        return
    import torch

    def tensor(side: Any) -> Any:
        return torch.from_numpy(side) if isinstance(side, np.ndarray) else side

    tensor(into).copy_(tensor(source))


def pack(content: Any) -> bytes:
    """Bytes from which `unpack` makes it again."""
    with contextlib.suppress(Exception):  # such as types of PyTorch, which only that can make again
        plain = pickle.dumps(content, _PICKLE)
        unpack(plain)
        return plain
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
    if is_divided(state):  # one of a stage
        tensors.append(state)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(state, dict):
        return {key: _without_tensors(value, tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(value, tensors) for value in state)
    return state


def with_tensors(structure: Any, layout: Layout, stream: np.ndarray, copies: bool = True) -> Any:
    """A structure, or a part of it, with its tensors: copies, or views of the stream."""

    def tensor_of(kind: str, number: int) -> Any:
        return (_tensor if kind == _TENSOR else _array)(layout, number, stream, copies)

    return _with(structure, tensor_of)


def _with(structure: Any, make: Callable[[str, int], Any]) -> Any:
    """A structure with what `made` gives for the kind and the number of each tensor in it."""
    if isinstance(structure, dict):
        for kind in (_TENSOR, _ARRAY):
            if kind in structure:
                return make(kind, structure[kind])
        return {key: _with(value, make) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(_with(value, make) for value in structure)
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
