"""Parameters that still travel while the model is used: who needs one waits for it, and for no other.

While a model's forward pass runs, each call of PyTorch's functions is intercepted: what gets a parameter that
travels waits for it first. Modules that are called by themselves wait for all.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from carme_runtime.torch.flat import tensors_in

__all__ = ["Arrivals", "has_arrivals", "note_arrivals", "settle_arrivals", "settle_optimizer"]

# What may be read of a parameter whose values are not there yet.
_NOT_VALUES = frozenset(
    [
        "device",
        "dtype",
        "grad",
        "grad_fn",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "is_sparse",
        "layout",
        "ndim",
        "requires_grad",
        "shape",
        "size",
        "dim",
        "numel",
        "stride",
        "is_floating_point",
        "is_contiguous",
    ]
)


class Arrivals:
    """What travels to the parameters of one model.

    Args:
        model: Its calls, and those of its modules, wait, and so do `state_dict` and `load_state_dict`.
        once: Leave the model to itself in the first call after all has arrived.
    """

    def __init__(self, model: nn.Module, once: bool = False) -> None:
        self._model, self._once = weakref.ref(model), once
        self.used = False  # by a call of the model, or of one of its modules
        self._due: dict[int, Callable[[], Any]] = {}  # by parameter or buffer
        self._leaving: list[Callable[[], Any]] = []
        self._waiting = threading.RLock()
        self._modes: list[_Looking] = []
        self._thread = 0  # that runs the watched forward pass
        self._hooks: list[Any] = []
        before = _Hook(self, Arrivals._before)
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(before))
            self._hooks.append(module.register_state_dict_pre_hook(_Hook(self, Arrivals._settle)))
            self._hooks.append(_before_load(module, _Hook(self, Arrivals._settle)))
        self._hooks.append(model.register_forward_hook(_Hook(self, Arrivals._after), always_call=True))

    def travel(self, parameters: Iterable[torch.Tensor], wait: Callable[[], Any]) -> None:
        """From now on these parameters or buffers are there when `wait` has returned."""
        for parameter in parameters:
            self._due[id(parameter)] = wait

    def leave(self, wait: Callable[[], Any]) -> None:
        """Parameters are read until `wait` has returned: they may be used, but not changed."""
        self._leaving.append(wait)

    def wait_all(self) -> None:
        """Wait for all that travels, here or from here."""
        with self._waiting:
            try:
                for wait in dict.fromkeys((*self._due.values(), *self._leaving)):
                    wait()
            finally:
                self._due.clear()
                self._leaving.clear()

    def wait_for(self, parameters: Iterable[Any]) -> None:
        """Wait for those of these that travel."""
        with self._waiting:
            for parameter in parameters:
                wait = self._due.get(id(parameter))
                if wait is not None:
                    wait()
                    self._due.pop(id(parameter), None)

    @contextlib.contextmanager
    def looking(self, first: Iterable[Any] | None) -> Iterator[None]:
        """Calls of PyTorch's functions in it wait for what they get.

        Args:
            first: What is waited for before, where not all is used by such calls; None: nothing.
        """
        if first is not None:
            self.wait_for(first)
        if not self._due:
            yield
            return
        with _Looking(self):
            yield

    @property
    def travelling(self) -> bool:
        """Whether something does."""
        return bool(self._due)

    def remove(self) -> None:
        """Leave the model to itself."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- hooks

    @torch._disable_dynamo  # pyright: ignore[reportUntypedFunctionDecorator]
    def _before(self, module: nn.Module, *_: Any) -> None:
        self.used = True
        if not self._due:
            if self._once and not self._leaving:
                self.remove()
            return
        if module is self._model() and not self._modes and not _is_compiled(module):
            mode = _Looking(self)
            mode.__enter__()
            self._modes.append(mode)
            self._thread = threading.get_ident()
        if self._modes and self._thread == threading.get_ident():
            # What is not written with PyTorch's functions gets its module's parameters at least.
            self.wait_for(module.parameters(recurse=_is_opaque(module)))
            self.wait_for(module.buffers(recurse=_is_opaque(module)))
        else:
            self.wait_all()

    @torch._disable_dynamo  # pyright: ignore[reportUntypedFunctionDecorator]
    def _after(self, *_: Any) -> None:
        if self._modes and self._thread == threading.get_ident():
            self._modes.pop().__exit__(None, None, None)
        self.wait_all()

    def _settle(self, *_: Any) -> None:
        self.wait_all()


class _Hook:
    """A hook that does not hold its model together; a copy of the model goes its own way."""

    def __init__(self, arrivals: Arrivals | None, action: Callable[..., None] | None) -> None:
        self._arrivals = weakref.ref(arrivals) if arrivals else None
        self._action = action

    @torch._disable_dynamo  # pyright: ignore[reportUntypedFunctionDecorator]
    def __call__(self, *arguments: Any, **_: Any) -> None:
        arrivals = self._arrivals() if self._arrivals else None
        if arrivals and self._action:
            self._action(arrivals, *arguments)

    def __deepcopy__(self, memo: object) -> "_Hook":
        return _Hook(None, None)

    def __reduce__(self) -> tuple[type, tuple[None, None]]:
        return _Hook, (None, None)


class _Looking(TorchFunctionMode):
    """Looks at what PyTorch's functions get."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if self._arrivals.travelling and _reads_values(func):
            self._arrivals.wait_for(tensors_in((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any) -> bool:
    """Whether one of PyTorch's functions may read the elements of what it gets."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of an attribute
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name not in _NOT_VALUES


# What has a checkpoint's values, which rank 0 has sent to all ranks.
_arrivals_of: "weakref.WeakKeyDictionary[nn.Module, Arrivals]" = weakref.WeakKeyDictionary()


def note_arrivals(model: nn.Module, arrivals: Arrivals) -> None:
    """All ranks get rank 0's values of this model's parameters and buffers, which travel already."""
    _arrivals_of[model] = arrivals


def has_arrivals(model: nn.Module) -> bool:
    """Whether that is so, and the model was not used since."""
    return model in _arrivals_of and not _arrivals_of[model].used


def settle_arrivals(model: nn.Module) -> None:
    """Wait for all values of a model that travel so."""
    if model in _arrivals_of:
        _arrivals_of[model].wait_all()


def settle_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Wait for the state that a checkpoint brings an optimizer, where one does."""
    if streamed := sys.modules.get("carme_runtime.checkpoint.streamed"):
        streamed.settle_optimizer(optimizer)


def _before_load(module: nn.Module, hook: _Hook) -> RemovableHandle:
    """Register what is called before a state is loaded into the module."""
    if hasattr(module, "register_load_state_dict_pre_hook"):
        return module.register_load_state_dict_pre_hook(hook)
    return module._register_load_state_dict_pre_hook(hook, with_module=True)  # before PyTorch 2.5


def _is_opaque(module: nn.Module) -> bool:
    """Whether what the module does does not come by PyTorch's Python functions."""
    return isinstance(module, torch.jit.ScriptModule)


def _is_compiled(model: nn.Module) -> bool:
    """Whether something may have been compiled: its parameters are used without a call that is seen."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:  # the compiler is not loaded, so it has compiled nothing
        return False
    backends = getattr(eval_frame, "cached_backends", {0: True})
    return any(backend is not None for backend in backends.values())
