"""The optimizer whose gradients are reduced over all ranks while backpropagation still runs."""

# As in torch/backend.py; and gradients live in the buckets of `parallelize`.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.horovod.compression import Compression
from carme_runtime.horovod.notes import BUCKET, note
from carme_runtime.horovod.reductions import TORCH_OPS, Average, ReduceOp, Sum, offered
from carme_runtime.horovod.world import world
from carme_runtime.torch.options import Options
from carme_runtime.torch.parallel import Parallel

# They treat each parameter by itself: some can be updated while the gradients of others are under way.
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta,
)  # fmt: skip


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
) -> Any:
    """Let `optimizer` step with the gradients of all ranks; it is changed in place and returned.

    All ranks get rank 0's parameters. An earlier one over some of the same parameters becomes an ordinary
    optimizer again: their gradients are reduced once, for both.

    Args:
        optimizer: Over the parameters of the model.
        named_parameters: `model.named_parameters()`; if given, it must name all that the optimizer has.
        compression: What gradients go through on their way: `Compression.none`, `Compression.fp16`, or an
            object with `compress(tensor)` and `decompress(tensor, ctx)`.
        backward_passes_per_step: Passes whose gradients are added up before they are reduced.
        op: `Average` or `Sum`.
        gradient_predivide_factor: With `Average`: gradients are divided by it before they are summed, and by
            the rest of the number of ranks afterwards.
        num_groups: How tensors are grouped is this function's business: has no effect.
        groups: As `num_groups`.
        sparse_as_dense: Make sparse gradients dense; without it they are refused.

    Raises:
        InvalidCall: An argument that cannot be.
    """
    if offered(op) not in (Average, Sum):
        raise InvalidCall(f"DistributedOptimizer got op={op!r}.", "Choose Average or Sum.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise InvalidCall("gradient_predivide_factor was given without averaging.", "Use op=Average.")
    _check_passes(backward_passes_per_step)
    _check_names(optimizer, named_parameters)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for former in list(world().optimizers.values()):
        if former.holds(held):
            former.restore_optimizer()
    vars(optimizer).pop("step", None)  # a scheduler's wrapper, which would lead around the reduction
    kind = type(optimizer)
    gradients = _Gradients(
        optimizer,
        backward_passes_per_step,
        compression,
        ReduceOp(op),
        gradient_predivide_factor,
        sparse_as_dense,
        kind,
    )
    optimizer._horovod = gradients  # pyright: ignore[reportAttributeAccessIssue]
    optimizer._plain_step = kind.step.__get__(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.__class__ = type(kind.__name__, (_Synchronized, type(optimizer)), {})
    return optimizer


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise InvalidCall("backward_passes_per_step is less than 1.", "Give 1 or more.")


def _check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> None:
    if named_parameters is None:
        return
    pairs = list(named_parameters)
    if any(not (isinstance(pair, tuple) and isinstance(pair[0], str)) for pair in pairs):
        raise InvalidCall(
            "named_parameters is not a sequence of names and parameters.", "Give model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidCall(f"named_parameters has these names twice: {', '.join(twice)}.", "Name each once.")
    known = {id(parameter) for _, parameter in pairs}
    unnamed = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if unnamed:
        raise InvalidCall(
            f"named_parameters leaves out {unnamed} of the optimizer's parameters.",
            "Name all of them: those of each model that the optimizer trains.",
        )


class _Synchronized:
    """What the optimizer's class gets in addition."""

    _horovod: "_Gradients"
    _plain_step: Callable[..., Any]

    def synchronize(self) -> None:
        """Wait until all gradients are reduced: afterwards they can be read, and clipped."""
        self._horovod.synchronize()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of so many passes from now on before they are reduced."""
        _check_passes(passes)
        self._horovod.count_passes(passes)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` in it take the gradients as they are, after `synchronize`."""
        self._horovod.skipping = True
        try:
            yield
        finally:
            self._horovod.skipping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of all ranks."""
        gradients = self._horovod
        if closure is not None:

            def reduced() -> Any:
                loss = closure()
                gradients.synchronize()
                gradients.begin_step()
                return loss

            return self._plain_step(reduced)
        if not gradients.skipping:
            if gradients.synchronized:
                warnings.warn(
                    "optimizer.step() was called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(). The gradients are not reduced again.",
                    stacklevel=2,
                )
            gradients.start_rest()
        result = super().step()  # pyright: ignore[reportAttributeAccessIssue]
        gradients.begin_step()
        return result

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]  (the class's own step calls the hooks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        if self._horovod.end_failed_pass():
            self._horovod.begin_step()
        if self._horovod.in_progress:
            raise InvalidCall(
                "optimizer.zero_grad() was called between backward and step.",
                "Call it before backward, or after step or synchronize.",
            )
        self._horovod.begin_anew()
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue]


class _Gradients(Parallel):
    """The buckets of an optimizer; means over ranks, whatever their shares of the batch."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        passes: int,
        compression: Any,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        kind: type[torch.optim.Optimizer],
    ) -> None:
        self._compression, self._op, self._predivide = compression, op, predivide
        self._dense, self._kind = sparse_as_dense, kind
        self.skipping = False
        self.begin_step()
        run = world()
        self._number, run.optimizers_created = run.optimizers_created, run.optimizers_created + 1
        overlaps = type(optimizer) in _ELEMENTWISE
        options = Options(accumulate=passes, overlap_step=overlaps, broadcast_buffers=False)
        super().__init__(_Holder(optimizer), optimizer, options)
        run.optimizers[self._number] = self

    def begin_step(self) -> None:
        """What comes now is for the next step."""
        self.in_progress = self.synchronized = self._started = False

    def begin_anew(self) -> None:
        """After `synchronize` without `step`, as where a gradient was infinite: that step is left out."""
        if self.synchronized:
            self.begin_step()

    def count_passes(self, passes: int) -> None:
        """Reduce after so many passes, counted from now on."""
        self._accumulate, self._passes = passes, 0

    def synchronize(self) -> None:
        """Wait for all buckets, and begin those that have not begun."""
        self.start_rest()
        self.finish()
        self.in_progress, self.synchronized = False, True

    def start_rest(self) -> None:
        """Reduce what is there, where `step` comes before the last backward pass, or without any."""
        self.end_failed_pass()
        if self._started:
            return
        self._started = self.in_progress = True
        self._passes = 0
        self._begin_pass()
        for bucket in self._buckets:
            for index in range(len(bucket.parameters)):
                self._take(bucket, index)
            bucket.complete()
            bucket.start(None)

    def holds(self, parameters: set[int]) -> bool:
        """Whether some of these parameters, named by their ids, are among its own."""
        return any(id(parameter) in parameters for parameter in self._parameters)

    def restore_optimizer(self) -> None:
        """Leave the gradients to another one, and let the optimizer be what it was."""
        self.detach()
        assert self._optimizer is not None
        self._optimizer.__class__ = self._kind
        world().optimizers.pop(self._number, None)

    def contribute_zeros(self, number: int) -> None:
        """Take part in the reduction of one bucket with nothing."""
        bucket = self._buckets[number]
        bucket.memory.zero_()
        plan: Any = bucket._plan
        plan.reduce().wait()

    def _fill(self, limit: int, least: int) -> Any:
        buckets = super()._fill(limit, least)
        plain = self._compression is Compression.none and self._op == Average and self._predivide == 1.0
        for number, bucket in enumerate(buckets if self._size > 1 else ()):
            plan = bucket._plan
            if plan is None or not plain:
                plan = _Reduction(bucket.memory, self._compression, self._op, self._predivide)
            bucket._plan = _Noted(plan, self._number, number)  # pyright: ignore[reportAttributeAccessIssue]
        return buckets

    def _scale(self) -> None:
        return None

    def end_failed_pass(self) -> bool:
        reduced = super().end_failed_pass()
        if reduced:
            self._started, self._passes = True, 0
        return reduced

    def _attach_to_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own step calls `start_rest`."""

    def _ready(self, parameter: nn.Parameter) -> None:
        self.end_failed_pass()
        self.begin_anew()
        if self._started:
            raise InvalidCall(
                f"Gradients were computed more than {self._accumulate} times before a call of step or "
                "synchronize.",
                "Give DistributedOptimizer the number as backward_passes_per_step.",
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            if not self._dense:
                raise InvalidCall("A gradient is sparse.", "Use sparse_as_dense=True.")
            parameter.grad = parameter.grad.to_dense()
        super()._ready(parameter)

    def _after_backward(self) -> None:
        reduces = self._reduces()
        super()._after_backward()
        if reduces:
            self._started = self.in_progress = True
            self._passes = 0


class _Holder(nn.Module):
    """The parameters of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.held = nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])


class _Noted:
    """A plan that notifies the ranks which have joined of each beginning."""

    def __init__(self, plan: Any, optimizer: int, bucket: int) -> None:
        self.reduce = plan.start
        self._optimizer, self._bucket = optimizer, bucket

    def start(self) -> Any:
        """Begin in the background."""
        note(None, BUCKET, self._optimizer, self._bucket)
        return self.reduce()

    def run(self) -> None:
        """Reduce now."""
        self.start().wait()


class _Reduction:
    """The repeated reduction of a bucket that goes through a compression."""

    def __init__(self, memory: torch.Tensor, compression: Any, op: ReduceOp, predivide: float) -> None:
        self._memory, self._compression, self._op, self._predivide = memory, compression, op, predivide

    def start(self) -> "_Reducing":
        """Begin in the background."""
        if self._predivide != 1.0:
            self._memory.div_(self._predivide)
        small, ctx = self._compression.compress(self._memory)
        work = dist.all_reduce(small, TORCH_OPS[self._op], async_op=True)

        def finish() -> None:
            whole = self._compression.decompress(small, ctx)
            if whole.data_ptr() != self._memory.data_ptr():
                self._memory.copy_(whole)
            if self._predivide != 1.0:
                self._memory.mul_(self._predivide)

        return _Reducing(work, finish)


class _Reducing:
    """A reduction under way."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        """Wait for it, and bring its result into the bucket."""
        self._work.wait()
        self._finish()
