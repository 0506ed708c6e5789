"""Buckets of gradients that are reduced together, and the plans by which they are."""

# As in backend.py.
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives import Pending, Plan
from carme_runtime.torch.stepping import Arriving

__all__ = [
    "EXTRA", "Bucket", "Repeated", "SplitPending", "SplitPlan", "elements", "flat_like", "padded",
    "view_like",
]  # fmt: skip

_ALIGNMENT = 64  # bytes of a cache line, where buckets begin
# A count of samples is two digits, which sums of 32-bit floats hold exactly.
_DIGIT, EXTRA = 4096, 2


class Repeated(Protocol):
    """A reduction of one buffer that is repeated."""

    def run(self) -> None:
        """Run it now."""
        ...

    def start(self) -> "Pending | SplitPending":
        """Begin in the background."""
        ...


class Bucket:
    """Gradients that are reduced together.

    Behind the gradients there is one element for each parameter, 1 where it had a part in the loss: their
    mean shows which parameters had none on any rank, and these keep no gradient, as in a single process. The
    last two elements are for a number of samples.

    What fewer bits lost of such a parameter's gradient in the step before arrives in this one, when nobody
    takes it. It travels again in the next one.

    Args:
        parameters: Of one type and device.
        memory: The flat buffer, of `elements(parameters)`.
        plan: The repeated mean of this buffer, where the core can reduce it in place.
        inline: Reduce in `finish` instead of in the background.
        extras_at: The element behind the gradients where the flags begin. Default: the next one.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        memory: torch.Tensor,
        plan: Repeated | None,
        inline: bool,
        extras_at: int | None = None,
    ) -> None:
        self.parameters, self.memory, self._plan, self._inline = parameters, memory, plan, inline
        self.views: list[torch.Tensor] = []
        begin = 0
        for parameter in parameters:
            part = memory[begin : begin + parameter.numel()]
            self.views.append(view_like(part, parameter))
            begin += parameter.numel()
        self._extras = memory[begin if extras_at is None else extras_at :]
        self._used, self._digits = self._extras.split([len(parameters), EXTRA])
        self._unused: list[int] = []
        self._left: dict[int, torch.Tensor] = {}  # what arrived of parameters that had no part
        self._arriving: list[Arriving] = []
        self._due: Repeated | None = None
        self._work: Any = None
        self._pending: Pending | SplitPending | None = None

    def complete(self) -> None:
        """What had no part in the loss on this rank counts as zero."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view
                self._unused.append(index)

    def start(self, scale: float | None, samples: int = 0) -> None:
        """Begin to take the mean over all ranks of `scale` times this rank's gradients, and of `samples`."""
        if self.memory.is_cuda:
            self._start_on_gpu(scale)
            return
        self._used.fill_(1)
        if self._unused:
            self._used[self._unused] = 0
        if scale == 0:
            self.memory.zero_()
        elif scale is not None:
            self.memory.mul_(scale)
        for index, left in self._left.items():
            self.views[index].add_(left)  # on every rank, so in the mean
        self._left.clear()
        self._digits[0], self._digits[1] = samples % _DIGIT, samples // _DIGIT
        if self._inline and self._plan is not None:
            self._due = self._plan
        elif self._plan is not None:
            self._pending = self._plan.start()
        elif dist.is_initialized() and dist.get_world_size() > 1:
            # Gloo has no mean.
            self.memory.div_(dist.get_world_size())
            self._work = dist.all_reduce(self.memory, async_op=True)

    def _start_on_gpu(self, scale: float | None) -> None:
        """The same with as few kernels as can be. Samples are counted on the host."""
        self.collect()
        self._extras.fill_(1)
        if self._unused:
            self._used[self._unused] = 0
        size = dist.get_world_size() if dist.is_initialized() and self._plan is None else 1
        factor = (1 if scale is None else scale) / size
        if factor == 0:
            self.memory.zero_()
        elif factor != 1:
            self.memory.mul_(factor)
        if self._plan is not None:
            self._pending = self._plan.start()
        elif size > 1:
            self._work = dist.all_reduce(self.memory, async_op=True)

    def collect(self) -> None:
        """Bring all gradients that autograd made in memory of its own into the bucket, by one kernel."""
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(gradient)
                parameter.grad = view
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, gradients)  # pyright: ignore[reportPrivateImportUsage]

    def arrives(self, wait: Callable[[], None]) -> None:
        """Until `finish`, who looks at a gradient calls `wait` before."""
        if not self._arriving:
            self._arriving = [Arriving.of(view, wait) for view in self.views]
        for parameter, gradient in zip(self.parameters, self._arriving, strict=True):
            parameter.grad = gradient

    @property
    def unused(self) -> bool:
        """Whether a parameter had no part in the loss on this rank."""
        return bool(self._unused)

    def samples(self, size: int) -> int:
        """What all `size` ranks gave to `start` together."""
        low, high = self._digits.tolist()
        return round(low * size) + _DIGIT * round(high * size)

    def finish(self) -> bool:
        """Wait for the mean, or take it now. False: it was not begun."""
        begun = bool(self._due or self._pending or self._work)
        if self._due is not None:
            self._due.run()
            self._due = None
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._work is not None:
            self._work.wait()
            self._work = None
        for parameter, view, gradient in zip(self.parameters, self.views, self._arriving, strict=False):
            if parameter.grad is gradient:  # it may have been forgotten meanwhile
                parameter.grad = view
        if self._unused:  # also where there is one rank, and nothing to begin
            for index in self._unused:
                if self._used[index] == 0:
                    self.parameters[index].grad = None
                    if isinstance(self._plan, SplitPlan) and self.views[index].any():
                        self._left[index] = self.views[index].clone()
            self._unused.clear()
        return begun

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that were reduced."""
        self.memory.mul_(factor)


class SplitPlan:
    """Two plans that run one after the other."""

    def __init__(self, *plans: Plan) -> None:
        self._plans = plans

    def run(self) -> None:
        """Run both now."""
        for plan in self._plans:
            plan.run()

    def start(self) -> "SplitPending":
        """Begin in the background."""
        return SplitPending([plan.start() for plan in self._plans])


class SplitPending:
    """Plans under way."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Wait for all of them."""
        for pending in self._pending:
            pending.wait()


def view_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Flat memory as a tensor whose elements lie as those of `parameter`, as fused kernels expect it."""
    dense, expected = parameter.numel() > 0, 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        dense = dense and (size == 1 or stride == expected)
        expected *= size
    if not dense:
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def flat_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of `value` in the order in which those of `parameter` lie."""
    if parameter.is_contiguous():
        return value.reshape(-1)
    laid = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
    return laid.copy_(value).as_strided((value.numel(),), (1,))


def elements(parameters: list[nn.Parameter]) -> int:
    """Of a bucket of these: gradients, flags, and the digits of a number of samples."""
    return sum(parameter.numel() for parameter in parameters) + len(parameters) + EXTRA


def padded(count: int) -> int:
    """So many bytes, up to where the next bucket may begin."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT
