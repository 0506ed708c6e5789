"""Operations under way, and the numbers by which scripts wait for them."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.horovod.process_sets import Members
from carme_runtime.horovod.world import world


class Name:
    """The name that a script gives an operation, which no other one of its kind may have until it is over.

    As in Horovod, kinds of operations and sets of ranks have names of their own.

    Args:
        kind: What the operation does, such as `allreduce`.
        text: What the script calls it.
        members: The ranks that take part.

    Raises:
        InvalidCall: An operation of this kind, name and ranks is under way.
    """

    def __init__(self, kind: str, text: str, members: Members) -> None:
        self.text = text
        self._key = kind, text, members.group
        self._in_use = world().names
        self._works: Sequence[Any] = ()
        if not all(work.is_completed() for work in self._in_use.get(self._key, ())):
            raise InvalidCall(
                f"{kind} got the name {text!r}, and an earlier {kind} of this name is still under way.",
                "Synchronize the earlier one first, or give each a name of its own.",
            )

    def hold(self, works: Sequence[Any]) -> None:
        """The operation has begun; it is over when these are."""
        self._works = self._in_use[self._key] = works

    def release(self) -> None:
        """The operation is over; a later one may have the name already."""
        if self._in_use.get(self._key) is self._works:
            del self._in_use[self._key]


def named(kind: str, text: str | None, members: Members) -> Name | None:
    """The name of an operation that is to begin, before it does anything; None: it has none.

    Raises:
        InvalidCall: As `Name`.
    """
    return Name(kind, text, members) if text else None


class _Handle:
    """An operation under way; `finish` makes its result."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], name: Name | None) -> None:
        self.works, self._finish, self._name = works, finish, name
        if name:
            name.hold(works)

    def result(self) -> Any:
        try:
            for work in self.works:
                work.wait()
        except Mismatch as error:
            if not self._name:
                raise
            raise Mismatch(f"{self._name.text}: {error.message}", error.remedy) from None
        finally:
            if self._name:
                self._name.release()
        with torch.no_grad():
            return self._finish()


_handles: dict[int, _Handle] = {}
_numbers = itertools.count()


def begun(works: Sequence[Any], finish: Callable[[], Any], name: Name | None) -> int:
    """A handle of what is under way. `finish` makes the result, `name` stands in messages."""
    number = next(_numbers)
    _handles[number] = _Handle(works, finish, name)
    return number


def together(handles: Sequence[int], name: Name | None) -> int:
    """One handle in the place of several without names; its result is a list."""
    held = [_handles.pop(handle) for handle in handles]
    works = [work for each in held for work in each.works]
    return begun(works, lambda: [each.result() for each in held], name)


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
    """As `Differentiable`, for an operation on several tensors that its gradients go through as well.

    The name is the operation's alone: a script cannot know when the gradients are reduced.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., list[torch.Tensor]], name: str | None, *tensors: Any) -> Any:
        ctx.run = run
        return tuple(run(tensors, name))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.run([gradient.contiguous() for gradient in gradients])


def no_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether none of them will need a gradient."""
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors)
