"""What changes gradients before a step that comes after fewer backward passes than `accumulate` says.

Such a step reduces what there is. Until then gradients are this rank's own. Each rank would clip by another
norm, and a rank that finds infinities would leave out a step that others make. So PyTorch's clipping and
GradScaler have them reduced first, and passes are counted anew after `zero_grad`.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.logs import log

__all__ = ["forget_windows", "late_pass", "watch_windows"]


class Windowed(Protocol):
    """What adds up the gradients of several passes."""

    def end_window_of(self, parameters: list[torch.Tensor]) -> None:
        """Reduce what there is, if some of these are among its parameters."""
        ...

    def begin_window_of(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of this optimizer are forgotten."""
        ...

    def end_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of this optimizer was made, or was left out on all ranks."""
        ...


# In the order in which they came, which ranks have in common: each of them reduces its gradients in its turn.
_known: "weakref.WeakKeyDictionary[Any, None]" = weakref.WeakKeyDictionary()


def watch_windows(windowed: Windowed) -> None:
    """Let PyTorch's functions that change gradients have them reduced first."""
    if not _known:
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            _watch_clipping(clip)
        _watch_scaler(torch.amp.GradScaler)
        _watch_zeroing(torch.optim.Optimizer)
    _known[windowed] = None


def forget_windows(windowed: Windowed) -> None:
    """It adds up gradients no longer."""
    _known.pop(windowed, None)


def late_pass(accumulate: int) -> InvalidCall:
    """The error for a pass that comes when the gradients of those before are reduced for a step."""
    return InvalidCall(
        f"A backward pass came after gradients of fewer than {accumulate} passes were reduced, for "
        "clip_grad_norm_, clip_grad_value_ or a GradScaler.",
        "Clip once for each step, and call optimizer.step() or optimizer.zero_grad() before the next pass.",
    )


def _end_windows(parameters: Iterable[Any]) -> None:
    tensors = list(parameters)
    for each in list(_known):
        each.end_window_of(tensors)


def _watch_clipping(clip: Callable[..., Any]) -> None:
    """Have gradients reduced when this function is called, by whatever name a script has imported it."""
    try:
        # What PyTorch decorates with no_grad() is a variable of the decorator's function.
        variable = clip.__closure__[clip.__code__.co_freevars.index("func")]  # pyright: ignore
    except (AttributeError, TypeError, ValueError):
        log.warning(
            "With this version of PyTorch, torch.nn.utils.%s sees this rank's gradients only, where a step "
            "comes after fewer passes than accumulate= of parallelize says. Use clip_norm=.",
            clip.__name__,
        )
        return
    original = variable.cell_contents
    if getattr(original, "of_windows", False):
        return

    @functools.wraps(original)
    def clipped(parameters: Any, *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        _end_windows([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        return original(parameters, *arguments, **keywords)

    clipped.of_windows = True  # pyright: ignore[reportFunctionMemberAccess]
    variable.cell_contents = clipped


def _watch_scaler(kind: Any) -> None:
    """Have gradients reduced when GradScaler looks for infinities; a step that it leaves out is over, too."""
    original = kind._unscale_grads_
    if getattr(original, "of_windows", False):
        return

    @functools.wraps(original)
    def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        _end_windows(parameter for group in optimizer.param_groups for parameter in group["params"])
        return original(scaler, optimizer, *arguments, **keywords)

    original_step = kind.step

    @functools.wraps(original_step)
    def step(scaler: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        result = original_step(scaler, optimizer, *arguments, **keywords)
        for each in list(_known):
            each.end_step_of(optimizer)
        return result

    unscale.of_windows = True  # pyright: ignore[reportFunctionMemberAccess]
    kind._unscale_grads_, kind.step = unscale, step


def _watch_zeroing(kind: Any) -> None:
    """Begin to count passes anew when an optimizer's gradients are forgotten."""
    original = kind.zero_grad
    if getattr(original, "of_windows", False):
        return

    @functools.wraps(original)
    def zero_grad(optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        for each in list(_known):
            each.begin_window_of(optimizer)
        return original(optimizer, *arguments, **keywords)

    zero_grad.of_windows = True  # pyright: ignore[reportFunctionMemberAccess]
    kind.zero_grad = zero_grad
