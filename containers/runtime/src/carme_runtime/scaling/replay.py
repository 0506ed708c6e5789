"""A step's calls of models, noted while a script makes them, and made again with smaller batches."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Result:
    """Stands for a tensor that an earlier call returned: which call, and where in what it returned."""

    call: int
    place: int


@dataclass
class Call:
    """One call of a module that no other module made."""

    module: nn.Module
    call: Callable[..., Any]
    arguments: Any
    keywords: Any


@dataclass
class Replay:
    """What one time through the calls took, in milliseconds.

    Args:
        forward: Until the last backward pass began.
        backward: Of the last backward pass.
        ready: When each parameter's gradient was complete in that pass, by the parameter's identity.
    """

    forward: float
    backward: float
    ready: dict[int, float] = field(default_factory=dict)


class Clock:
    """Moments on a device, without waiting for it at each of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """This moment, for what was given to the device so far."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait for the device."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds, after `finish`."""
        return first.elapsed_time(last) if self._is_gpu else (last - first) * 1000


class Notes:
    """The calls of one step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._results: dict[int, tuple[torch.Tensor, Result]] = {}

    def add(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A module was called and returned `result`."""
        number = len(self.calls)
        self.calls.append(Call(module, as_now(call), self._noted(args), self._noted(kwargs)))
        for place, tensor in enumerate(tensors(result)):
            # Kept, so that no other tensor gets its identity.
            self._results[id(tensor)] = (tensor, Result(number, place))

    def _noted(self, structure: Any) -> Any:
        def detached(tensor: torch.Tensor) -> Any:
            known = self._results.get(id(tensor))
            return known[1] if known else tensor.detach()

        return mapped(structure, detached)


def as_now(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, later in the precision in which a script computes now (autocast)."""
    kinds = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    if not kinds:
        return call

    def computed(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind, number_type in kinds:
                stack.enter_context(torch.autocast(kind, dtype=number_type))
            return call(*args, **kwargs)

    return computed


def batch_of(calls: list[Call]) -> int:
    """The first dimension of the first tensor that was given; 0: there is none."""
    for call in calls:
        for tensor in tensors((call.arguments, call.keywords)):
            if tensor.ndim:
                return len(tensor)
    return 0


class Repeated:
    """Calls that are made again.

    Args:
        calls: Of one step.
        batch: Samples of it.
    """

    def __init__(self, calls: list[Call], batch: int) -> None:
        self._calls, self._batch = calls, batch
        used = {result.call for call in calls for result in _results((call.arguments, call.keywords))}
        self._ends = [number for number in range(len(calls)) if number not in used]
        modules = dict.fromkeys(call.module for call in calls)
        own = (p for module in modules for p in module.parameters() if p.requires_grad)
        self.parameters: list[nn.Parameter] = list({id(p): p for p in own}.values())
        self.modules = list(modules)
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.clock = Clock(self.device)

    @property
    def main(self) -> nn.Module:
        """The module with the most parameters."""
        return max(self.modules, key=lambda module: sum(p.numel() for p in module.parameters()))

    def names(self) -> dict[int, str]:
        """Parameters' names, by identity."""
        return {id(p): name for module in self.modules for name, p in module.named_parameters()}

    def run(self, samples: int) -> Replay:
        """Once forward and backward with the first samples of the batch."""
        clock, moments = self.clock, dict[int, Any]()
        for parameter in self.parameters:
            parameter.grad = None
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p: moments.update({id(p): clock.mark()}))
            for parameter in self.parameters
        ]
        clock.finish()
        begin = clock.mark()
        turn = end = begin
        try:
            for loss in self._losses(samples):
                moments.clear()
                turn = clock.mark()
                torch.autograd.backward(loss)
                end = clock.mark()
        finally:
            for hook in hooks:
                hook.remove()
        clock.finish()
        ready = {name: clock.between(turn, moment) for name, moment in moments.items()}
        return Replay(clock.between(begin, turn), clock.between(turn, end), ready)

    def _losses(self, samples: int) -> Iterator[torch.Tensor]:
        """Something to begin a backward pass from, for each call whose result no other call gets."""
        results: list[list[torch.Tensor]] = []

        def at_size(argument: Any) -> Any:
            if isinstance(argument, Result):
                return results[argument.call][argument.place]
            if argument.ndim and len(argument) == self._batch:
                return argument[:samples]
            return argument

        for number, call in enumerate(self._calls):
            arguments, keywords = mapped(call.arguments, at_size), mapped(call.keywords, at_size)
            result = call.call(*arguments, **keywords)
            results.append(list(tensors(result)))
            if number in self._ends and (loss := _loss(result)) is not None:
                yield loss

    def held_bytes(self, samples: int) -> int:
        """What the backward pass needs, besides the parameters."""
        own = {p.untyped_storage().data_ptr() for p in self.parameters}
        blocks: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                blocks[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.run(samples)
        return sum(blocks.values())

    def layer_times(self, samples: int) -> dict[str, tuple[str, float]]:
        """Class and milliseconds of the forward pass of each layer that has no layers of its own."""
        clock, begun, spans = self.clock, dict[str, Any](), dict[str, list[tuple[Any, Any]]]()
        hooks: list[Any] = []
        kinds: dict[str, str] = {}
        for name, layer in self.main.named_modules():
            if next(layer.children(), None) is None and name:
                kinds[name] = type(layer).__name__
                hooks += _span_hooks(layer, name, clock, begun, spans)
        try:
            self.run(samples)
        finally:
            for hook in hooks:
                hook.remove()
        return {
            name: (kinds[name], sum(clock.between(first, last) for first, last in marks))
            for name, marks in spans.items()
        }

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Leave gradients, buffers and random numbers as they were."""
        gradients = [parameter.grad for parameter in self.parameters]
        buffers = [(b, b.detach().clone()) for module in self.modules for b in module.buffers()]
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.enable_grad():
                yield
        finally:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _span_hooks(
    layer: nn.Module, name: str, clock: Clock, begun: dict[str, Any], spans: dict[str, list[tuple[Any, Any]]]
) -> list[Any]:
    def begin(*_: Any) -> None:
        begun[name] = clock.mark()

    def end(*_: Any) -> None:
        spans.setdefault(name, []).append((begun[name], clock.mark()))

    return [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]


def tensors(structure: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, dict):
        for value in structure.values():
            yield from tensors(value)
    elif isinstance(structure, (list, tuple)):
        for value in structure:
            yield from tensors(value)


def _results(structure: Any) -> Iterator[Result]:
    if isinstance(structure, Result):
        yield structure
    elif isinstance(structure, dict):
        for value in structure.values():
            yield from _results(value)
    elif isinstance(structure, (list, tuple)):
        for value in structure:
            yield from _results(value)


def mapped(structure: Any, change: Callable[[Any], Any]) -> Any:
    """The same with each tensor, or what stands for one, changed."""
    if isinstance(structure, (torch.Tensor, Result)):
        return change(structure)
    if type(structure) is dict:
        return {name: mapped(value, change) for name, value in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(mapped(value, change) for value in structure)
    return structure


def _loss(result: Any) -> torch.Tensor | None:
    """A number whose backward pass goes through the whole result."""
    found = list(tensors(result))
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and not loss.ndim:
        found = [loss]
    sums = [tensor.sum() for tensor in found if tensor.requires_grad and tensor.is_floating_point()]
    return torch.stack(sums).sum() if len(sums) > 1 else next(iter(sums), None)
