"""Watches a script's own training, until there are enough steps to measure; then measures, and ends it."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import importlib
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import data

from carme_runtime.graph import Links
from carme_runtime.scaling import measuring
from carme_runtime.scaling.probing import Probe
from carme_runtime.scaling.profiles import Input, Profile
from carme_runtime.scaling.replay import Call, Notes, Repeated, batch_of
from carme_runtime.scaling.sampling import (
    LOADING,
    MOST_FACTOR,
    REPLAYING,
    WARM,
    Step,
    common_batch,
    drift,
    factor,
    relative,
    shortage,
    spread,
)

_LIKE_STEPS = 2  # largest batches whose passes are delayed about as steps are


class Watch(Probe):
    """The probe of one process; see `Probe`."""

    def __init__(self, file: Path, network: str | None, seconds: float) -> None:
        super().__init__(file, network, seconds)
        self._step, self._notes = Step(), Notes()
        self._last = 0.0
        self._depth = 0
        self._in_backward = False
        self._thread = threading.main_thread().ident
        self._loader: Any = None
        self._keras = False

    def install(self) -> None:
        """Watch calls of modules, backward passes, loaders, and steps of optimizers."""
        _wrap_call(nn.Module, self)
        backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._find_keras()
            if self._in_backward or not self._watches():
                return backward(*args, **kwargs)
            self._in_backward = True
            began = self._now()
            try:
                return backward(*args, **kwargs)
            finally:
                self._in_backward = False
                self._step.backward += self._now() - began

        torch.autograd.backward = timed
        self._watch_loaders()
        optimizers: Any = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))

    def shortage(self) -> str:
        """What is missing for a result; empty: nothing was seen that could have one."""
        return shortage(self.steps, self._seconds) if self.steps else ""

    def called(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Note a call that no other module makes."""
        if self._depth or self._in_backward or not self._watches() or not torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        self._depth += 1
        began = self._now()
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._depth -= 1
        self._step.forward += self._now() - began
        self._notes.add(module, lambda *a, **k: call(module, *a, **k), args, kwargs, result)
        return result

    def _watches(self) -> bool:
        return not self.over and threading.get_ident() == self._thread

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _watch_loaders(self) -> None:
        iterate = data.DataLoader.__iter__

        def seen(loader: Any) -> Any:
            if self._watches() and torch.is_grad_enabled():  # else it is of a validation
                self._loader = loader
            return iterate(loader)

        data.DataLoader.__iter__ = seen
        base: Any = data.dataloader._BaseDataLoaderIter
        fetch = base.__next__

        def timed(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                return fetch(iterator)
            finally:
                self._step.load += time.perf_counter() - began

        base.__next__ = timed

    def _find_keras(self) -> None:
        """Keras calls its layers and makes its steps by itself."""
        keras: Any = sys.modules.get("keras")
        if self._keras or keras is None or not hasattr(keras, "optimizers"):
            return
        self._keras = True
        if keras.backend.backend() != "torch":
            return
        _wrap_call(keras.Layer, self)
        base = keras.optimizers.Optimizer
        apply = base.apply

        def applied(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = apply(optimizer, *args, **kwargs)
            self._stepped(optimizer)
            return result

        base.apply = applied

    def _stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step. Where there are several, one of them counts."""
        if not self._watches() or not self._follows(optimizer):
            return
        now = self._now()
        step, notes, last = self._step, self._notes, self._last
        self._step, self._notes, self._last = Step(), Notes(), now
        self.steps += 1
        self._began = self._began or now
        if self.steps <= WARM:
            return
        step.whole, step.batch = now - last, batch_of(notes.calls)
        self._watched.append(step)
        if self._is_enough(now - self._began, [each.batch for each in self._watched]):
            self._conclude(lambda: self._profile(notes.calls, optimizer))

    def _profile(self, calls: list[Call], optimizer: Any) -> Profile:
        """Raises ScalingError."""
        batch = common_batch([step.batch for step in self._watched], batch_of(calls))
        same = [step for step in self._watched if step.batch == batch]
        repeated = Repeated(calls, batch)
        with repeated.preserved():
            return profile_of(
                repeated,
                same,
                links=self._links,
                loader=self._loader,
                state=_state(optimizer),
                seconds=self._seconds,
            )


def profile_of(
    repeated: Repeated,
    steps: list[Step],
    *,
    links: Links,
    loader: Any,
    state: list[Any],
    seconds: float,
) -> Profile:
    """The profile of a step that was watched, and is made again. Raises ScalingError."""
    batch = steps[0].batch
    timings, gradients, passes = measuring.measured(repeated, batch, REPLAYING * seconds)
    sizes = [timing.samples for timing in timings]
    watched = [[1000 * step.forward for step in steps], [1000 * step.backward for step in steps]]
    # A loss that is not a module is not made again: its backward pass is in the script's alone.
    repeated_passes = list(zip(*passes[batch], strict=True))
    factors = [factor(*pair) for pair in zip(watched, repeated_passes, strict=True)]
    scaled = tuple(type(t)(t.samples, t.forward_ms * factors[0], t.backward_ms * factors[1]) for t in timings)
    return Profile(
        type(repeated.main).__name__,
        measuring.device_name(repeated.device),
        batch,
        scaled,
        _fixed_ms(steps, watched, repeated_passes),
        gradients,
        spread=spread([*relative([step.forward + step.backward for step in steps]), *_largest(passes)]),
        input=measuring.input_of(loader, LOADING * seconds) if loader is not None else Input(),
        memory=measuring.memory(repeated, sizes, state),
        layers=measuring.layers(repeated, sizes) if len(sizes) > 1 else (),
        links=links,
        drift=drift([sum(map(sum, turn)) for turn in zip(*passes.values(), strict=True)]),
    )


def _fixed_ms(steps: list[Step], watched: Sequence[Sequence[float]], repeated: Any) -> float:
    """What a step takes besides its passes: the middle of what each watched one took besides its own.

    The middles of whole steps and of passes are of different steps, and their noise would be as large as it.
    For the same reason what `factor` leaves out as noise is no part of it, so the predicted step of one rank
    differs from the watched one by at most half of a standard error. Passes shrink with a rank's share of the
    batch, and this does not: noise of 1 % of a step would be 14 % of the steps of 16 ranks.

    Args:
        steps: Those that were watched.
        watched: Milliseconds of their forward and of their backward passes.
        repeated: Of the same made again. What the script's take beyond many times as long belongs to this;
            where none of the script's were seen, these are no part of it.
    """
    besides = 1000 * statistics.median(s.whole - s.load - s.forward - s.backward for s in steps)
    for script, again in zip(map(statistics.median, watched), map(statistics.median, repeated), strict=True):
        besides += max(script - MOST_FACTOR * again, 0.0) if script > 0 else -again
    return max(besides, 0.0)


def _largest(passes: measuring.Passes) -> list[float]:
    """Passes of the largest batches in parts of their middle. Smaller ones are over before a delay comes."""
    sizes = sorted(passes)[-_LIKE_STEPS:]
    return [part for size in sizes for part in relative([sum(each) for each in passes[size]])]


def _state(optimizer: Any) -> list[Any]:
    """Tensors that an optimizer keeps."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [value for state in optimizer.state.values() for value in state.values()]
    return [getattr(variable, "value", None) for variable in getattr(optimizer, "variables", [])]


def _wrap_call(base: Any, watch: Watch) -> None:
    call = base.__call__

    def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
        return watch.called(module, call, args, kwargs)

    base.__call__ = noted
