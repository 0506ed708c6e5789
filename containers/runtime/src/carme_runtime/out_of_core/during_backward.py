"""An optimizer's step that runs during the backward pass, one parameter after the other.

A parameter is in memory when its gradient is made. Stepped then, its gradient goes nowhere, and the parameter
itself does not come back for the step. That changes when gradients can be used, so a script asks for it, and
its first step shows whether it does anything else with them.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import torch

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core.optimizers import takes_parameters_alone, view_of
from carme_runtime.out_of_core.watch import Operations

NOT_REQUESTED = "adopt(..., step_during_backward=True) asks for it"
ON_GPU = "it is for the host's memory only"
_FIRST = "the first step shows what the script does with gradients"
_USED = "the script uses gradients between the backward pass and the step, such as for clipping them"
_PASSES = "several backward passes make the gradients of a step"
_CLOSURE = "the gradients are made within the step, by a closure"
_HOOKED = "the optimizer has hooks that run before its step"
_RANKS = "ranks have to average the gradients first"


class StepDuringBackward:
    """Steps parameters during the backward pass, if the script lets it; a budget has one.

    Args:
        optimizer: Of the model's parameters.
        operations: Of the budget.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, operations: Operations) -> None:
        self._optimizer, self._operations = optimizer, operations
        self._probes = True  # the first step
        self.reason = _FIRST  # why it is not used; empty: it is
        self._count: dict[torch.Tensor, int] = {}  # backward passes of a parameter in this step
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._settings: list[dict[str, Any]] = []  # of the groups, when the first parameter was stepped
        self._stepped: dict[torch.Tensor, None] = {}  # since the last step
        self._spent: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        if not takes_parameters_alone(optimizer):
            self._give_up(f"{type(optimizer).__name__} does not take each parameter by itself")
        elif _has_ranks():
            self._give_up(_RANKS)
        self._removals: list[Callable[[], None]] = []
        if self._probes:
            hooks = [optimizer.register_step_pre_hook(self._before_step)]
            hooks.append(optimizer.register_step_post_hook(self._after_step))
            for group in optimizer.param_groups:
                hooks += [
                    each.register_post_accumulate_grad_hook(self._gradient_is_there)
                    for each in group["params"]
                    if each.requires_grad
                ]
            self._removals = [hook.remove for hook in hooks]

    def close(self) -> None:
        """From now on steps are as ever. Parameters that have been stepped have no gradients."""
        for remove in self._removals:
            remove()
        self._removals.clear()
        self._operations.watched.clear()
        markers = {each.untyped_storage()._cdata for each in self._spent.values()}
        for group in self._optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None and each.grad.untyped_storage()._cdata in markers:
                    each.grad = None

    def _give_up(self, reason: str) -> None:
        self._probes, self.reason = False, reason
        self._operations.watched.clear()

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if self._probes:
            self._count[parameter] = self._count.get(parameter, 0) + 1
            if self._count[parameter] > 1:
                self._give_up(_PASSES)
            else:
                self._operations.watched[gradient.untyped_storage()._cdata] = self._is_used
        elif not self.reason:
            self._step(parameter)

    def _is_used(self) -> None:
        if self._probes:
            self.reason = _USED  # unless it is a further backward pass, which is known soon

    def _step(self, parameter: torch.Tensor) -> None:
        if not self._settings:
            self._settings = self._current_settings()
            self._groups = {each: group for group in self._optimizer.param_groups for each in group["params"]}
        if parameter in self._stepped:
            raise CarmeRuntimeError(
                "A second backward pass came before optimizer.step(), which had run during the first one.",
                "Call optimizer.step() after each backward pass, or leave step_during_backward out.",
            )
        group = self._groups.get(parameter)
        if group is None:
            return
        kind: Any = type(self._optimizer)
        step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step
        step(view_of(self._optimizer, [{**group, "params": [parameter]}]))
        parameter.grad = self._marker(parameter)
        self._stepped[parameter] = None

    def _marker(self, parameter: torch.Tensor) -> torch.Tensor:
        """What stands for a gradient that is gone; using it raises an error that says so."""
        key = (parameter.dtype, parameter.device)
        if key not in self._spent:
            self._spent[key] = sink = torch.zeros((), dtype=key[0], device=key[1])
            self._operations.watched[sink.untyped_storage()._cdata] = _refuse
        return self._spent[key].expand(parameter.shape)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._probes:
            self._end_probe(optimizer)
        if not self._stepped:
            return
        if self._settings != self._current_settings():
            raise CarmeRuntimeError(
                "Settings of the optimizer changed after the backward pass, during which the step had run.",
                "Change them before the backward pass, or leave step_during_backward out.",
            )
        for parameter in self._stepped:
            parameter.grad = None

    def _end_probe(self, optimizer: Any) -> None:
        hooks = len(getattr(optimizer, "_optimizer_step_pre_hooks", ()))
        if self.reason is _FIRST:
            self.reason = _CLOSURE if not self._count else _HOOKED if hooks > 1 else ""
        self._probes = False
        self._operations.watched.clear()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # Gradients that are not taken away before the next backward pass would be added up.
        for parameter in self._stepped:
            parameter.grad = self._marker(parameter)
        self._stepped.clear()
        self._settings = []

    def _current_settings(self) -> list[dict[str, Any]]:
        return [
            {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for group in self._optimizer.param_groups
        ]


def _has_ranks() -> bool:
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def _refuse() -> None:
    raise CarmeRuntimeError(
        "A gradient is used that is gone: its parameter was stepped during the backward pass.",
        "Call optimizer.zero_grad() before each backward pass and use gradients for nothing else, or leave "
        "step_during_backward out.",
    )
