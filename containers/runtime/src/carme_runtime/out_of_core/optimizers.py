"""The order in which an optimizer's step takes the parameters."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

import torch

_TOGETHER = 4 << 20  # bytes of parameters that are taken at a time; a larger one is taken alone


def parameter_by_parameter(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """A hook before an optimizer's step: let it end with one parameter before it begins with the next one.

    An optimizer that takes lists passes over all parameters, gradients and state once for each of its
    operations, and none of them stays in memory from one to the next. The numbers are the same either way, as
    PyTorch's optimizers treat each parameter by itself; others, and L-BFGS, are left alone. What later hooks
    and the step's closure change in the optimizer's groups holds for this step, as ever.

    Returns:
        The arguments of the step, with a view of the optimizer whose groups have few parameters each.
    """
    if not takes_parameters_alone(optimizer):
        return None
    groups = _Groups(optimizer)
    if len(groups) == len(optimizer.param_groups):
        return None
    return (view_of(optimizer, groups), *args[1:]), kwargs


def takes_parameters_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it treats each parameter by itself, as all of PyTorch's do but L-BFGS."""
    kind = type(optimizer)
    return f"{kind.__module__}.".startswith("torch.optim.") and kind is not torch.optim.LBFGS


def view_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Any:
    """The same optimizer, with the same state, and with other groups."""
    view: Any = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__, param_groups=groups)
    return view


class _Groups(list[dict[str, Any]]):
    """Groups of few parameters each, made of an optimizer's groups as these are at each access."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for group in self._optimizer.param_groups:
            yield from _parts(group)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, place: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: Any) -> Any:
        return list(iter(self))[place]


def _parts(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    part: list[torch.Tensor] = []
    size = 0
    for parameter in group["params"]:
        own = parameter.numel() * parameter.element_size()
        if part and size + own > _TOGETHER:
            yield {**group, "params": part}
            part, size = [], 0
        part.append(parameter)
        size += own
    yield {**group, "params": part}
