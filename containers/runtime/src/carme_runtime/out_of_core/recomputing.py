"""Forward passes that are computed again in the backward pass, where moving what they leave takes longer.

The first steps show what each group of layers takes, and what it leaves for its backward pass. PyTorch's own
`torch.utils.checkpoint` then computes again what was chosen.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from carme_runtime.logs import log
from carme_runtime.out_of_core.plan import Recomputed
from carme_runtime.out_of_core.trace import DoesNotFit, Trace
from carme_runtime.out_of_core.watch import Operations, tensors_of

NOT_REQUESTED = "adopt(..., recompute=True) asks for it"
ON_GPU = "it is for the host's memory only"
_FIRST = "the first two steps show what it would save"
_NO_LAYERS = "the model has no layers in a row, in torch.nn.Sequential or torch.nn.ModuleList"
_NOT_CHEAPER = "moving what layers leave for the backward pass takes no longer than computing it again"
_UNKNOWN = "what a step moves could not be found out"
_STEPS = 2  # the first one makes the optimizer's state


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A forward pass: its first operation in the step, the first one behind it, and its result's blocks."""

    begin: int
    end: int
    results: frozenset[int]


class _Group:
    """Layers that follow each other, whose forward pass can be computed again as a whole.

    Args:
        layers: Which.
        call: Runs them.
        operations: Of the budget.
    """

    def __init__(self, layers: Sequence[nn.Module], call: Callable[..., Any], operations: Operations) -> None:
        self._layers, self._call, self._operations = layers, call, operations
        self.passes: list[_Pass] = []  # in this step
        self.again = False  # whether the backward pass computes it again
        self.is_pure = True  # as far as is known: it changes no buffer and nothing that it is given
        self._modes: set[tuple[bool, ...]] = set()  # of its modules, in which that is known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        mode = tuple(each.training for layer in self._layers for each in layer.modules())
        known = [*tensors_of(args, kwargs), *(each for layer in self._layers for each in layer.buffers())]
        versions, begin = [each._version for each in known], self._operations.steps.position + 1
        if self.again and mode in self._modes:
            result = checkpoint(self._call, *args, use_reentrant=False, **kwargs)
        else:  # such as a BatchNorm that trains from now on: computed again, it would count twice
            result = self._call(*args, **kwargs)
        self._modes.add(mode)
        self.is_pure = self.is_pure and versions == [each._version for each in known]
        self.again = self.again and self.is_pure
        blocks = [self._operations.block_of(each) for each in tensors_of((result,), {})]
        labels = frozenset(block.label for block in blocks if block is not None)
        self.passes.append(_Pass(begin, self._operations.steps.position + 1, labels))
        return result

    def cost(self, trace: Trace) -> tuple[float, int]:
        """Seconds of the forward passes in a step, and bytes that they leave for the backward pass."""
        seconds, left = 0.0, 0
        for each in self.passes:
            seconds += trace.clock[each.end] - trace.clock[each.begin]
            for operation in trace.operations[each.begin : each.end]:
                left += sum(
                    size
                    for label, size in operation.makes
                    if label not in each.results and trace.gone[label] >= each.end
                )
        return seconds, left


class _Forward:
    """What stands for the forward pass of a module; copies of the module have their own.

    Args:
        module: Whose.
        call: What runs instead.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")  # when that is looked up, the copy has only its class's


class Recomputing:
    """Chooses groups of layers of models; a budget has one.

    Args:
        operations: Of the budget.
        report: Called with what was chosen.
    """

    def __init__(self, operations: Operations, report: Callable[[Recomputed], None] = lambda _: None) -> None:
        self._operations, self._report, self._steps = operations, report, 0
        self._changed: list[nn.Module] = []
        self._groups: list[_Group] = []
        self.found = Recomputed(reason=_NO_LAYERS)

    def add(self, model: nn.Module) -> None:
        """Let groups of its layers be chosen from, too."""
        self._groups += self._groups_of(model)
        if self._groups:
            self.found = Recomputed(reason=_FIRST)

    def close(self) -> None:
        """From now on forward passes are as ever."""
        for module in self._changed:
            module.__dict__.pop("forward", None)
        self._changed.clear()

    def end_step(self, trace: Trace | None, room: int, write_rate: float, read_rate: float) -> None:
        """A step has ended; the second one shows what is computed again from now on.

        Args:
            trace: Of this step.
            room: Bytes for blocks and workspaces.
            write_rate: Bytes in a second that the disk takes.
            read_rate: Bytes in a second that it gives.
        """
        self._steps += 1
        if self._steps == _STEPS:
            if trace is not None and self._groups:
                try:
                    moving = _moving_seconds(trace, room, write_rate, read_rate)
                    self._choose(trace, moving, 1 / read_rate + 1 / write_rate, room)
                except Exception:  # whatever it is, training goes on as it was
                    log.exception("No forward pass is computed again: %s.", _UNKNOWN)
                    self._leave_as_it_was()
            self._report(self.found)
        for group in self._groups:
            group.passes.clear()

    def _leave_as_it_was(self) -> None:
        """Nothing is computed again, as before anything was chosen."""
        for group in self._groups:
            group.again = False
        self.found = Recomputed(of=len(self._groups), reason=_UNKNOWN)

    def _choose(self, trace: Trace, moving: float, seconds_per_byte: float, room: int) -> None:
        """Take the groups that save most for what they cost, while the disk takes longer than computing.

        What a group leaves is there at once when it is computed again. If that needs most of the memory, it
        would be moved then.
        """
        computing, taken = trace.seconds, list[tuple[float, int]]()
        costs = [(group, *group.cost(trace)) for group in self._groups if group.is_pure]
        costs = [
            each
            for each in costs
            if each[1] < each[2] * seconds_per_byte and each[2] <= room / 2 * len(each[0].passes)
        ]
        for group, seconds, left in sorted(costs, key=lambda each: each[1] / each[2]):
            saved = left * seconds_per_byte
            if computing + seconds <= moving - saved:
                group.again = True
                computing, moving = computing + seconds, moving - saved
                taken.append((seconds, left))
        if taken:
            self._operations.steps.record_anew()
        left = sum(each[1] for each in taken)
        self.found = Recomputed(
            groups=len(taken),
            of=len(self._groups),
            seconds=sum(each[0] for each in taken),
            bytes=left,
            instead_seconds=left * seconds_per_byte,
            reason="" if taken else _NOT_CHEAPER,
        )

    def _groups_of(self, module: nn.Module) -> Iterator[_Group]:
        """The groups of a module, which from now on run as such.

        Parts of it that have groups already, as the program called them by themselves, keep those.
        """
        if _runs_groups(module):
            return
        if isinstance(module, nn.ModuleList):
            for layer in module:
                if _is_plain(layer) and any(layer.children()) and not _is_divided(layer):
                    yield self._whole(layer)
                else:
                    yield from self._groups_of(layer)
        elif type(module) is nn.Sequential and _is_plain(module) and len(module) > 1:
            calls: list[Callable[..., Any]] = []
            for part in _parts(list(module)):
                if _is_divided(part[0]):
                    calls += part
                    yield from self._groups_of(part[0])
                else:
                    calls.append(group := _Group(part, _one_after_the_other(part), self._operations))
                    yield group
            self._change(module, _in_groups(module, calls))
        else:
            for child in module.children():
                yield from self._groups_of(child)

    def _whole(self, layer: nn.Module) -> _Group:
        group = _Group([layer], layer.forward, self._operations)
        self._change(layer, group)
        return group

    def _change(self, module: nn.Module, call: Callable[..., Any]) -> None:
        module.forward = _Forward(module, call)
        self._changed.append(module)


def _moving_seconds(trace: Trace, room: int, write_rate: float, read_rate: float) -> float:
    """How long the disk works for a step; if too little memory is left to plan it: if all moved."""
    try:
        traffic = trace.traffic(room, write_rate, read_rate)
    except DoesNotFit:
        return trace.whole * (1 / read_rate + 1 / write_rate)
    return traffic.read / read_rate + traffic.written / write_rate


def _is_plain(module: nn.Module) -> bool:
    """Whether nobody else has put something in the place of its forward pass."""
    return "forward" not in module.__dict__


def _runs_groups(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), _Forward)


def _is_divided(module: nn.Module) -> bool:
    """Whether it is made of groups, and is none itself."""
    return _has_rows(module) or any(map(_runs_groups, module.modules()))


def _has_rows(module: nn.Module) -> bool:
    """Whether it has layers in a row that have layers of their own: then those are groups, and it is none."""
    rows = (each for each in module.modules() if isinstance(each, nn.Sequential | nn.ModuleList))
    return any(len(row) > 1 and any(any(layer.children()) for layer in row) for row in rows)


def _parts(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Layers in a row: each with layers of its own alone; of n others about the root of n together."""
    single = sum(not any(layer.children()) for layer in layers)
    most = max(round(math.sqrt(single)), 2)
    parts: list[list[nn.Module]] = []
    for layer in layers:
        alone = any(layer.children())
        if alone or not parts or len(parts[-1]) == most or any(parts[-1][0].children()):
            parts.append([])
        parts[-1].append(layer)
    return parts


def _in_groups(row: nn.Sequential, calls: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    layers, forward = list(row), _one_after_the_other(calls)

    def forward_of_row(value: Any) -> Any:
        if list(row) != layers:  # the program has changed them since: the groups are of those before
            return type(row).forward(row, value)
        return forward(value)

    return forward_of_row


def _one_after_the_other(calls: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    def forward(value: Any) -> Any:
        for call in calls:
            value = call(value)
        return value

    return forward
