"""Operations under way, and the numbers by which scripts wait for them."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from carme_runtime.collectives.errors import InvalidCall, Mismatch


class _Handle:
    """An operation under way; `finish` makes its result."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], name: str | None) -> None:
        self.works, self._finish, self._name = works, finish, name

    def result(self) -> Any:
        try:
            for work in self.works:
                work.wait()
        except Mismatch as error:
            if not self._name:
                raise
            raise Mismatch(f"{self._name}: {error.message}", error.remedy) from None
        with torch.no_grad():
            return self._finish()


_handles: dict[int, _Handle] = {}
_numbers = itertools.count()


def begun(works: Sequence[Any], finish: Callable[[], Any], name: str | None) -> int:
    """A handle of what is under way. `finish` makes the result, `name` stands in messages."""
    number = next(_numbers)
    _handles[number] = _Handle(works, finish, name)
    return number


def together(handles: Sequence[int], name: str | None) -> int:
    """One handle in the place of several; its result is a list."""
    held = [_handles.pop(handle) for handle in handles]
    works = [work for one in held for work in one.works]
    return begun(works, lambda: [one.result() for one in held], name)


def poll(handle: int) -> bool:
    """Whether the operation is over, so that `synchronize` will not wait."""
    return all(work.is_completed() for work in _known(handle).works)


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation, and return its result."""
    known = _known(handle)
    del _handles[handle]
    return known.result()


def _known(handle: int) -> _Handle:
    try:
        return _handles[handle]
    except KeyError:
        raise InvalidCall(
            f"There is no operation with handle {handle} under way.", "Synchronize each handle once."
        ) from None


class Differentiable(torch.autograd.Function):
    """An operation, and another one that its gradient goes through."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, run: Callable[[torch.Tensor], Any], back: Callable[..., torch.Tensor]
    ) -> Any:
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0].contiguous()), None, None


class Grouped(torch.autograd.Function):
    """As `Differentiable`, for an operation on several tensors that its gradients go through as well."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], *tensors: Any) -> Any:
        ctx.run = run
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *ctx.run([gradient.contiguous() for gradient in gradients])


def no_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether none of them will be asked for a gradient."""
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors)
