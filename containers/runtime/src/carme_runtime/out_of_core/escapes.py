"""Has tensors in memory when a program reads or changes them past PyTorch's operations."""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core.blocks import Block
from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.out_of_core.trace import DoesNotFit
from carme_runtime.out_of_core.watch import Operations

# Methods of tensors; the first ones give an array that keeps the memory unless it is a copy, the others an
# address.
_ARRAYS, _ADDRESSES = ("numpy", "__array__"), ("data_ptr", "__dlpack__", "share_memory_", "tolist")


@contextlib.contextmanager
def accesses_have_memory(operations: Operations) -> Iterator[None]:
    """Let methods of tensors that give away their memory have it there.

    Methods are replaced for this: a mode for functions would see, and slow down, every function of PyTorch.
    """
    kind: Any = torch.Tensor
    own = {name: kind.__dict__.get(name) for name in (*_ARRAYS, *_ADDRESSES)}
    for name in own:
        setattr(kind, name, _with_memory(operations, name, getattr(kind, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:  # the tensors' base has it
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _with_memory(operations: Operations, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors that has their memory there, as long as what it returns needs it."""

    @functools.wraps(method)
    def with_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        block = operations.block_of(tensor) if operations.sees_this_thread() else None
        if block is None:
            return method(tensor, *args, **kwargs)
        store = operations.store
        acquire(operations, block, changes=name != "tolist")
        try:
            result = method(tensor, *args, **kwargs)
        except BaseException:  # such as for a tensor that requires gradients
            store.release([block])
            raise
        if name in _ARRAYS and _lies_in(tensor.untyped_storage(), result):
            weakref.finalize(_whole(result), store.unpin, block)
        else:
            if name in _ADDRESSES and name != "tolist":
                store.pin_for_step(block)
            store.release([block])
        return result

    return with_memory


def acquire(operations: Operations, block: Block, changes: bool = False) -> None:
    """Have a block in memory until the store releases it.

    Raises:
        CarmeRuntimeError: The limit is too small for it, or the disk failed.
    """
    try:
        operations.store.acquire([block], [block] if changes else [], 0)
    except DoesNotFit:
        raise CarmeRuntimeError(
            f"A tensor of {show_size(block.size)} does not fit into the limit of memory beside those that "
            "NumPy arrays or addresses keep there.",
            "Delete the arrays that you made of tensors, or set a larger limit.",
        ) from None


class FileWriter(torch._C.PyTorchFileWriter):
    """What torch.save writes with: has each storage in memory while it is written."""

    operations: Operations

    def write_record(self, name: str, data: Any, size: int) -> None:
        block = None
        if hasattr(data, "_cdata"):
            block = self.operations.store.blocks.get(data._cdata)
        if block is None:
            super().write_record(name, data, size)
            return
        acquire(self.operations, block)
        try:
            super().write_record(name, data, size)
        finally:
            self.operations.store.release([block])


def _lies_in(storage: torch.UntypedStorage, array: Any) -> bool:
    """Whether an array is in a tensor's memory, and not a copy, such as of another type."""
    begin, address = storage.data_ptr(), array.__array_interface__["data"][0]
    return begin <= address < begin + storage.nbytes()


def _whole(array: Any) -> Any:
    """The array that others are views of."""
    while isinstance(array.base, type(array)):
        array = array.base
    return array
