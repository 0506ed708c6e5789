"""How PyTorch calls what `parallelize` attaches to a model."""

# As in backend.py.
# pyright: reportMissingImports=false

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["BeforeForward", "attached", "weakly"]


class BeforeForward:
    """The model's hook; a copy of the model, or one that was saved, goes its own way.

    Args:
        parallel: Whose `before_forward` is called.
    """

    def __init__(self, parallel: Any = None) -> None:
        self.parallel = parallel

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.parallel is not None:
            self.parallel.before_forward(module, arguments, keywords)

    def __deepcopy__(self, memo: object) -> "BeforeForward":
        return BeforeForward()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return BeforeForward, ()


def attached(model: nn.Module) -> list[Any]:
    """What was attached to a model and was not detached."""
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, BeforeForward)]
    return [hook.parallel for hook in hooks if hook.parallel]


def weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """Calls `method` as long as its object is there: who collects garbage does not see parameters' hooks."""
    reference = weakref.WeakMethod(method)

    def call(parameter: nn.Parameter) -> None:
        if present := reference():
            present(parameter)

    return call
