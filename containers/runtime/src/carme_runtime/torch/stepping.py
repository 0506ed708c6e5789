"""An optimizer's step that begins while gradients still travel.

The method is that of DistributedDataParallel's optimizer overlap, but for ordinary scripts: `backward`
returns when its own gradients are made, a step waits for one part of them after the other, and who looks at
a parameter's gradient between the two waits for all.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["Arriving", "step_in_parts", "without_state"]


class Arriving(torch.Tensor):
    """A gradient that still travels, with its own memory: whatever is done with it waits for it first.

    Python's calls come to `__torch_function__`, and those that C++ makes to `__torch_dispatch__`.
    """

    _memory: torch.Tensor
    _wait: Callable[[], None]

    @staticmethod
    def of(memory: torch.Tensor, wait: Callable[[], None]) -> "Arriving":
        """What stands for the gradient `memory` until `wait` has returned."""
        arriving = torch.Tensor._make_subclass(Arriving, memory)
        arriving._memory, arriving._wait = memory, wait
        return arriving

    @classmethod
    def __torch_function__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        return _with_arrived(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        return _with_arrived(func, args, kwargs)


def _with_arrived(call: Any, arguments: Any, keywords: Any) -> Any:
    arguments, keywords = tree_map_only(Arriving, _arrived, (arguments, keywords or {}))
    # What stands in a structure that is not seen through comes again, by `__torch_dispatch__`.
    with torch._C.DisableTorchFunctionSubclass():
        return call(*arguments, **keywords)


def _arrived(gradient: Arriving) -> torch.Tensor:
    gradient._wait()
    return gradient._memory


def step_in_parts(
    optimizer: torch.optim.Optimizer,
    parts: Callable[[], tuple[Mapping[int, tuple[int, int]], int]],
    arrive: Callable[[int], None],
    arrive_all: Callable[[], None],
) -> "OwnStep":
    """Let the optimizer's step update the parameters of one part after the other, each when it is there.

    Its hooks are called once, before the first part and after the last one. A copy of the optimizer, or one
    that was saved, steps as if nothing had happened.

    Args:
        optimizer: Its class becomes one of the same name: schedulers wrap the class's function.
        parts: For each parameter, by its id, the number of its part and its place there; and how many parts
            there are. Other parameters come with the last one.
        arrive: Wait for the gradients of a part.
        arrive_all: Wait for all of them.

    Returns:
        What gives the optimizer its own step back.
    """
    kind: Any = type(optimizer)
    # PyTorch wraps what calls the hooks around a class's own function.
    whole = getattr(kind.step, "__wrapped__", kind.step)

    def step(self_: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            return whole(self_, _followed_by(arrive_all, closure))
        place, count = parts()
        if not count:
            return whole(self_)
        groups = self_.param_groups  # others since a state was loaded
        shares = _shares([group["params"] for group in groups], place, count)
        # Who asks for the optimizer's state meanwhile, as a signal's handler may, finds all of it.
        part = without_state(kind)
        vars(part).update(vars(self_))
        for number, share in enumerate(shares):
            arrive(number)
            part.param_groups = [
                {**group, "params": parameters} for group, parameters in zip(groups, share, strict=True)
            ]
            whole(part)
        for group, stepped in zip(groups, part.param_groups, strict=True):
            group.update((key, value) for key, value in stepped.items() if key != "params")
        vars(self_).update((key, value) for key, value in vars(part).items() if key != "param_groups")
        return None

    def reduce(self_: Any, protocol: Any) -> Any:
        return without_state, (kind,), self_.__getstate__()  # pyright: ignore[reportAttributeAccessIssue]

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    optimizer.__class__ = type(kind.__name__, (kind,), {"step": hooked, "__reduce_ex__": reduce})
    return OwnStep(optimizer, kind)


def _followed_by(arrive_all: Callable[[], None], closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure after which all gradients that it has made are there."""

    def closed() -> Any:
        found = closure()
        arrive_all()
        return found

    return closed


class OwnStep:
    """The step that an optimizer had before its parts were stepped one after the other."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        self._optimizer, self._kind = optimizer, kind

    def remove(self) -> None:
        """Give it back."""
        self._optimizer.__class__ = self._kind


def without_state(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer of this class that has nothing yet: a copy gets all from the one that it is of."""
    return kind.__new__(kind)


_made = without_state  # its name in optimizers that were pickled earlier


def _shares(
    groups: Sequence[list[torch.nn.Parameter]], place: Mapping[int, tuple[int, int]], parts: int
) -> list[list[list[torch.nn.Parameter]]]:
    """For each part what it has of each group."""
    shares: list[list[list[torch.nn.Parameter]]] = [[[] for _ in groups] for _ in range(parts)]
    for index, parameters in enumerate(groups):
        for parameter in parameters:
            number, _ = place.get(id(parameter), (parts - 1, 0))
            shares[number][index].append(parameter)
    return shares
