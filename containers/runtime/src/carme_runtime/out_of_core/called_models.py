"""The models that a script trains, where it does not say so: those that it calls."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class CalledModels:
    """Notices each model before its first forward pass that leaves something for a backward pass.

    A model is a module with trained parameters that is not a part of another one called before.

    Args:
        notice: Called with each.
    """

    def __init__(self, notice: Callable[[nn.Module], None]) -> None:
        self._notice = notice
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook = register_module_forward_pre_hook(self._before)

    def close(self) -> None:
        """Notice no more; calls of modules cost what they did."""
        self._hook.remove()

    def _before(self, module: nn.Module, _: Any) -> None:
        if module in self._known or not (module.training and torch.is_grad_enabled()):
            return
        if torch.compiler.is_exporting():  # its forward pass is traced, not run
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._known.update(module.modules())
            self._notice(module)
