"""The phases of training with PyTorch: forward passes, backward passes and optimizers' steps.

Batches of its DataLoader, the fourth, are seen by `profile.watch_loaders`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
import importlib
import threading
import time
from typing import Any

from carme_runtime import profile


class _Depth(threading.local):
    """Of this thread: whether a pass runs, within which calls are not passes of their own."""

    forward = False
    backward = False


_depth = _Depth()
_begun: dict[int, float] = {}  # steps of optimizers


def watch() -> None:
    """See the phases of all models and optimizers of this process. torch must have been imported."""
    import torch

    module = torch.nn.Module
    if hasattr(module.__call__, "carme_phases"):
        return
    _watch_forward(module)
    _watch_backward(torch.autograd)
    optimizers: Any = importlib.import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: _begin_step(optimizer))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: _end_step(optimizer))


def _watch_forward(module: Any) -> None:
    call = module.__call__

    @functools.wraps(call)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _depth.forward or _depth.backward:
            return call(self, *args, **kwargs)
        _depth.forward, began = True, time.perf_counter()
        try:
            return call(self, *args, **kwargs)
        finally:
            _depth.forward = False
            profile.record(profile.PHASE, "forward", began)

    timed.carme_phases = True
    module.__call__ = timed


def _watch_backward(autograd: Any) -> None:
    backward = autograd.backward

    @functools.wraps(backward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if _depth.backward:
            return backward(*args, **kwargs)
        _depth.backward, began = True, time.perf_counter()
        try:
            return backward(*args, **kwargs)
        finally:
            _depth.backward = False
            profile.record(profile.PHASE, "backward", began)

    autograd.backward = timed


def _begin_step(optimizer: Any) -> None:
    _begun[id(optimizer)] = time.perf_counter()


def _end_step(optimizer: Any) -> None:
    began = _begun.pop(id(optimizer), None)
    if began is not None:
        profile.record(profile.PHASE, "optimizer", began)
