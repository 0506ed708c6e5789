"""What stands for a gradient that is divided among the ranks."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from carme_runtime.collectives.errors import InvalidCall

__all__ = ["Divided"]

# What may be done with it: of its values nobody learns anything.
_ZERO = {"zero_", "_foreach_zero_"}
_HARMLESS = {
    "data_ptr", "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset",
    "is_contiguous", "is_floating_point", "is_complex", "get_device", "requires_grad_", "detach_",
    "untyped_storage", "__len__", "__hash__",
}  # fmt: skip
_VALUES = {"data", "grad", "T", "H", "mT", "mH", "real", "imag"}  # attributes that lead to values


class Divided(torch.Tensor):
    """Of the mean gradient this rank has a part: who looks at it is refused, who zeroes it is not.

    Python's calls come to `__torch_function__`, and those that C++ makes to `__torch_dispatch__`.
    """

    _memory: torch.Tensor
    _zeroed: bool

    @staticmethod
    def of(memory: torch.Tensor) -> "Divided":
        """What stands for the gradient that `memory` holds."""
        divided = torch.Tensor._make_subclass(Divided, memory)
        divided._memory, divided._zeroed = memory, False
        return divided

    def hide(self) -> None:
        """From now on it is divided."""
        self._zeroed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__repr__":
            return "<a gradient that is divided among the ranks>"
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        harmless = name in _HARMLESS or (attribute and attribute not in _VALUES)
        return _call(func, name, args, kwargs, bool(harmless))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        return _call(func, name, args, kwargs, name in ("detach_",))


def _refusal(name: str) -> InvalidCall:
    """The error for the call `name` of a gradient that is divided."""
    if name.startswith("_amp_"):  # of GradScaler, which looks for infinities in all gradients
        return InvalidCall(
            "With shard_optimizer gradients are divided among the ranks: GradScaler cannot use one.",
            "Use torch.autocast with bfloat16, which needs no GradScaler, or leave shard_optimizer out.",
        )
    return InvalidCall(
        f"With shard_optimizer gradients are divided among the ranks: {name} cannot use one.",
        "Call optimizer.zero_grad() before each step's first pass, clip with clip_norm= and "
        "add passes up with accumulate= of parallelize; or leave shard_optimizer out.",
    )


def _call(func: Any, name: str, args: Any, kwargs: Any, harmless: bool) -> Any:
    zeroes = name in _ZERO
    if not harmless:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Divided):
                leaf._zeroed = leaf._zeroed or zeroes
                if not leaf._zeroed:
                    raise _refusal(name)
    args, kwargs = tree_map_only(Divided, lambda leaf: leaf._memory, (args, kwargs or {}))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
