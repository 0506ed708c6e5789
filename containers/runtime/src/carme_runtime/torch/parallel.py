"""Data-parallel training in two lines: gradients in shared memory, reduced while backpropagation still runs.

The method is that of DistributedDataParallel (Li et al., PyTorch Distributed, VLDB 2020): gradients are
gathered in buckets in the order in which backpropagation makes them, and a bucket is reduced as soon as it is
full. Here the buckets lie in a segment of the runtime's core, so that ranks of a node reduce them in place.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import atexit
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.logs import log
from carme_runtime.torch.arrivals import Arrivals, has_arrivals, settle_arrivals, settle_optimizer
from carme_runtime.torch.buckets import Bucket
from carme_runtime.torch.buffers import Buffers
from carme_runtime.torch.core_group import CoreGroup, core_group
from carme_runtime.torch.filling import Filling, check_divisible, limits
from carme_runtime.torch.flat import tensors_in
from carme_runtime.torch.fused import fuse
from carme_runtime.torch.hooks import BeforeForward, attached, weakly
from carme_runtime.torch.joining import check_alike, join_run
from carme_runtime.torch.memory import keep_freed_memory
from carme_runtime.torch.nesting import call_at_end, inner_step, is_nested, watch_nesting
from carme_runtime.torch.options import Options
from carme_runtime.torch.sharding import ShardBucket, Shards, check_optimizer
from carme_runtime.torch.stepping import step_in_parts
from carme_runtime.torch.streaming import check_streamable, stream
from carme_runtime.torch.weighting import Weighting
from carme_runtime.torch.windows import forget_windows, late_pass, watch_windows

__all__ = ["Parallel", "join_run", "parallelize"]

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    bucket_mb: float | None = None,
    overlap_step: bool = False,
    broadcast_buffers: bool = True,
    wire: str = "",
    batch_dim: int = 0,
    shard_optimizer: bool = False,
    start: str = "",
) -> tuple[Model, torch.optim.Optimizer]:
    """Train `model` data-parallel over all ranks of the run.

        model, optimizer = parallelize(model, optimizer)    # the training loop stays as it is

    Each rank calls the model with its own share of the global batch. The optimizer gets the gradients of the
    mean loss over the global batch, also if shares differ in length or are empty. On the host SGD, Adam and
    AdamW use PyTorch's fused kernel, unless you set `fused` or `foreach`.

    Args:
        model: A model on the host or on one GPU. All ranks get the parameters and buffers of rank 0.
        optimizer: An optimizer over parameters of this model.
        accumulate: Backward passes per step. Gradients are those of the sum of the passes' losses, divided by
            this number, also by a step after fewer passes. They are reduced in the last pass, or by what
            comes first after fewer: that step, PyTorch's clipping, or a GradScaler.
        clip_norm: Clip the norm of all gradients to this before each step. Default: no clipping.
        bucket_mb: Size in MiB of the buckets in which gradients are reduced together; between nodes the last
            ones are smaller. Default: CARME_FUSION_THRESHOLD_KB, else 8 on one node, 1 between nodes.
        overlap_step: Return from `backward` while gradients are still being reduced, and let the step update
            each bucket's parameters as soon as it is ready. Reading a parameter's `grad` before the step
            waits for all. Not with `clip_norm`, and only for optimizers that treat each parameter by itself.
        broadcast_buffers: Copy rank 0's buffers, such as running means, to all ranks before each training
            pass.
        wire: How 32-bit gradients on the host travel between nodes: `bf16` sends half the bytes, `int8` a
            quarter. What a step loses by rounding is added to the next one. Default: 32 bits.
        batch_dim: Which dimension of the model's first tensor is the batch: 1 for (sequence, batch).
        shard_optimizer: Divide the optimizer's state and step among the ranks (ZeRO 1); no `grad` is set.
            All ranks call `optimizer.state_dict()` together; it returns what one process would have. With
            `overlap_step` parameters are still being sent when the step returns: until the next forward
            pass use them only through calls of the model and its `state_dict`.
        start: "streamed": return while rank 0's parameters are still being sent; the first forward pass waits
            for each of them. Until then use them only through calls of the model, its `state_dict` and its
            `load_state_dict`. Default: return when all ranks have them.

    Returns:
        The same model and the same optimizer.

    Raises:
        InvalidCall: An argument is invalid, or the ranks have different models.
    """
    options = Options(
        accumulate, clip_norm, bucket_mb, overlap_step, broadcast_buffers, wire, batch_dim,
        shard_optimizer, start,
    )  # fmt: skip
    join_run()
    Parallel(model, optimizer, options)
    return model, optimizer


class Parallel:
    """What `parallelize` attaches to a model and its optimizer.

    A trainer with an optimizer of its own gives None for it, and finds the reduced gradients in the
    parameters' `grad` when `backward` returns.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: Options | None = None,
    ) -> None:
        self._options = options = options or Options()
        self._model, self._optimizer = model, optimizer
        self._batch_dim, self._accumulate, self._clip_norm = (
            options.batch_dim, options.accumulate, options.clip_norm,
        )  # fmt: skip
        for former in attached(model):
            if optimizer and former._optimizer and _held(optimizer) & _held(former._optimizer):
                former.detach()  # this one takes its place
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        is_shared = self._size > 1
        self._group = core_group()
        self._parameters = self._trained(model)
        self._given_buffers = Buffers(model) if options.broadcast_buffers and is_shared else None
        shard, self._shards = options.shard_optimizer and is_shared, None
        if optimizer:
            self._check(optimizer, shard)
            self._parameters = self._divide_among_optimizers()
        stream_group = check_streamable(model, self._group) if options.streamed and is_shared else None
        if self._agree(streams=stream_group is not None):
            stream_group = None
        if optimizer and shard:
            settle_optimizer(optimizer)
        keep_freed_memory(self._parameters)
        if optimizer and not shard:
            fuse(optimizer)
        # Where computing takes all cores of the only node, a thread that reduces beside it would only be in
        # its way.
        # Nor may who looks at a gradient have to reduce it, as others may not look.
        overlaps = options.overlap_step
        self._inline = not overlaps and self._group is not None and self._group.no_core_idles()
        self._filling = Filling(self._group, self._size, options.wire, shard, self._inline)
        # Then gradients are what the optimizer needs as they are.
        self._alone = not is_shared and self._accumulate == 1 and optimizer is not None
        self._finishing = threading.RLock()  # a thread may look at gradients while another one steps
        self._passes = 0
        self._early = False  # whether gradients are reduced that fewer passes than announced have made
        self._weighting = Weighting(self._size)
        self._rests = False
        self._of_parameters: list[Any] = []  # hooks
        self._gather_parameters()
        self._overlap_step = overlaps and bool(self._buckets)
        self._attach(shard and overlaps, stream_group)
        if optimizer and shard and self._buckets:
            self._divide(optimizer)
        elif optimizer and self._overlap_step:
            self._overlap(optimizer)

    def _gather_parameters(self) -> None:
        """Let the parameters' gradients come into buckets."""
        for hook in self._of_parameters:
            hook.remove()
        near = self._group is None or self._group.on_one_node()
        self._buckets = [] if self._alone else self._fill(*limits(self._options.bucket_bytes, near))
        log.debug("Gradients are reduced in %d parts.", len(self._buckets))
        self._place = {
            id(parameter): (number, index)
            for number, bucket in enumerate(self._buckets)
            for index, parameter in enumerate(bucket.parameters)
        }
        self._weighting.count_in(self._buckets[:1] if near or not self._options.wire else ())
        self._begin_pass()
        ready, reduced = weakly(self._ready), [] if self._alone else self._parameters
        self._of_parameters = [p.register_post_accumulate_grad_hook(ready) for p in reduced]

    def _attach(self, travels: bool, stream_group: CoreGroup | None) -> None:
        """Have PyTorch call this at each gradient, forward pass and step.

        Args:
            travels: Whether parameters still travel when a step returns.
            stream_group: What carries rank 0's parameters while the model is used; None: all have them.
        """
        model, optimizer = self._model, self._optimizer
        watch_nesting()
        self._hooks: list[Any] = [model.register_forward_pre_hook(BeforeForward(self), with_kwargs=True)]
        if optimizer:
            self._attach_to_steps(optimizer)
        self._arrivals = Arrivals(model, once=not travels) if travels or stream_group else None
        if stream_group and self._arrivals:
            stream(self.parameters_of(model), stream_group, self._arrivals)
            _underway.add(self)

    def _attach_to_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the gradients that a step needs, and clip them."""
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        if self._accumulate > 1:
            watch_windows(self)

    # -- for trainers with a loop of their own

    @staticmethod
    def parameters_of(model: nn.Module) -> list[nn.Parameter]:
        """All parameters of a model, in an order that ranks have in common."""
        return list(model.parameters())

    def _trained(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of a model that have gradients."""
        return [parameter for parameter in self.parameters_of(model) if parameter.requires_grad]

    def covers(self, model: nn.Module) -> bool:
        """Whether these are the parameters that `model` trains now."""
        now = self._trained(model)
        return len(now) == len(self._parameters) and all(
            a is b for a, b in zip(now, self._parameters, strict=True)
        )

    def state_share(self, samples: int, total: int) -> None:
        """From now on a pass is over `samples` of a global batch of `total`; nothing is counted."""
        self._weighting.state(samples, total)
        self._rests = False

    def rest(self) -> None:
        """Until the next share is stated, gradients are this rank's own."""
        self._rests = True

    def detach(self) -> None:
        """Leave model and optimizer to themselves."""
        self.end_failed_pass()
        self.finish()
        self.settle()
        if self._arrivals:
            self._arrivals.remove()
        forget_windows(self)
        for hook in (*self._hooks, *self._of_parameters):
            hook.remove()
        self._hooks.clear()
        self._of_parameters.clear()

    def settle(self) -> None:
        """Wait for all parameters that travel."""
        if self._arrivals:
            self._arrivals.wait_all()

    # -- the beginning

    def _divide_among_optimizers(self) -> list[nn.Parameter]:
        """Of the parameters those of this optimizer and of none; other optimizers of the model keep theirs.

        A gradient that two reduced would be weighted twice.
        """
        formers = [each for each in attached(self._model) if each._optimizer]
        elsewhere = {key for former in formers for key in former.keep_own()}
        return [parameter for parameter in self._parameters if id(parameter) not in elsewhere]

    def keep_own(self) -> set[int]:
        """Leave to another optimizer what is not of this one; the ids of what is."""
        assert self._optimizer is not None
        own = _held(self._optimizer)
        remaining = [parameter for parameter in self._parameters if id(parameter) in own]
        if len(remaining) < len(self._parameters):
            self.end_failed_pass()
            self.finish()
            self._parameters = remaining
            self._gather_parameters()
            self._take_all()  # of a step's first passes
        return own

    def _check(self, optimizer: torch.optim.Optimizer, shard: bool) -> None:
        """Raise InvalidCall for an optimizer of other parameters, or one that `shard` cannot divide."""
        known = {id(parameter) for parameter in self._parameters}
        if any(id(p) not in known for g in optimizer.param_groups for p in g["params"] if p.requires_grad):
            raise InvalidCall(
                "The optimizer has parameters that the model does not have.",
                "Make the optimizer with model.parameters(), and give both to parallelize. If it trains "
                "several models, give these as one torch.nn.ModuleDict.",
            )
        if shard:
            check_optimizer(optimizer, self._parameters)
            check_divisible(self._model, self._group)

    def _divide(self, optimizer: torch.optim.Optimizer) -> None:
        """Let each rank step its part of the parameters."""
        shards = Shards(
            optimizer,
            cast(list[ShardBucket], self._buckets),
            self._finish_bucket,
            self.finish,
            self._inline and not any(parameter.is_cuda for parameter in self._parameters),
            self._arrivals,
        )
        shards.fuse(fuse)
        self._shards = shards
        self._hooks.append(shards)

    def _agree(self, streams: bool) -> bool:
        """All ranks have the same model, and rank 0's values, unless parameters are streamed.

        Returns:
            Whether they are streamed, and a checkpoint that travels brings them.
        """
        if self._size == 1:
            return False
        arrive = check_alike(self._parameters, has_arrivals(self._model))
        if streams and all(arrive):
            return True
        settle_arrivals(self._model)
        with torch.no_grad():
            parameters = () if streams else self.parameters_of(self._model)
            for tensor in (*parameters, *self._model.buffers()):
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, src=0)
                tensor.copy_(whole)
        return False

    def _fill(self, limit: int, least: int) -> list[Bucket]:
        return self._filling.buckets(self._parameters, limit, least)

    # -- a pass

    def _begin_pass(self) -> None:
        self._waiting = [len(bucket.parameters) for bucket in self._buckets]
        self._next = 0  # the first bucket that is not being reduced
        self._in_backward = self._holds = False
        self._ending: Callable[[], Any] = _no_model

    # It talks to the other ranks, which cannot be compiled.
    @torch._disable_dynamo  # pyright: ignore[reportUntypedFunctionDecorator]
    def before_forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The model is called with these arguments."""
        if self._alone or self._rests or module is not self._model or not torch.is_grad_enabled():
            return
        if self._optimizer:
            self._refuse_new_parameters()
        if self.end_failed_pass():
            for parameter in self._parameters:
                parameter.grad = None  # of no use to anybody
        self.finish()  # nobody has made a step
        if (self._early or self._is_within()) and all(p.grad is None for p in self._parameters):
            self._begin_window()
        dim = self._batch_dim
        inputs = tensors_in((arguments, keywords))
        self._weighting.begin_pass(next((t.shape[dim] for t in inputs if t.dim() > dim), 1))
        if not module.training:  # a rank may do that alone, unless backpropagation follows
            return
        if self._given_buffers:
            self._given_buffers.give()
        if self._reduces():
            self._weighting.count()

    def _refuse_new_parameters(self) -> None:
        """Refuse to train a parameter that is not reduced: ranks would drift apart without a word."""
        new = [p for p in self._model.parameters() if p.requires_grad and id(p) not in self._place]
        if new:  # unless they have an optimizer of their own
            known = {id(p) for each in attached(self._model) for p in each._parameters}
            new = [p for p in new if id(p) not in known]
        if new:
            name = next(name for name, parameter in self._model.named_parameters() if parameter is new[0])
            raise InvalidCall(
                f"{name} is to be trained now, but was not when parallelize was called.",
                "Call parallelize again after parameters were added or unfrozen.",
            )

    def _reduces(self) -> bool:
        """Whether the pass that comes or runs is the last before a step."""
        return (self._passes + 1) % self._accumulate == 0

    def _is_within(self) -> bool:
        """Whether passes for the next step were made, and others are to come."""
        return self._passes % self._accumulate != 0

    def _ready(self, parameter: nn.Parameter) -> None:
        """Backpropagation has made this parameter's gradient."""
        if self._rests:
            return
        number, index = self._place[id(parameter)]
        self.end_failed_pass()
        if not self._in_backward:
            self._begin_backward()
        if number < self._next:
            raise InvalidCall(
                "A parameter got a second gradient in one backward pass, when its first one was on its way.",
                "If a checkpoint uses the parameter, call it with use_reentrant=False.",
            )
        # Passes inside of this one may each make a gradient of one parameter: all are there in the end.
        self._holds = self._holds or is_nested()
        self._take(self._buckets[number], index)
        self._waiting[number] -= 1
        if self._reduces() and not self._holds:
            self._start_full_buckets()

    def _begin_backward(self) -> None:
        """The first gradient of a pass is there."""
        if self._early:
            raise late_pass(self._accumulate)
        self.finish()
        if not self._weighting.counted and self._reduces():
            self._weighting.count()
        self._in_backward = True
        ending = functools.partial(self._after_backward)
        self._ending = weakref.ref(ending)
        call_at_end(ending)

    def _take(self, bucket: Bucket, index: int) -> None:
        """Bring a gradient into its bucket, unless autograd has added to it there."""
        parameter, view = bucket.parameters[index], bucket.views[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise InvalidCall(
                "A gradient is sparse, and gradients are gathered in memory of their own.",
                "Make the layer with sparse=False: what is zero does not travel between nodes anyhow.",
            )
        if gradient is None or bucket.memory.is_cuda or gradient.data_ptr() == view.data_ptr():
            return  # on a GPU the whole bucket is taken at once
        with torch.no_grad():
            view.copy_(gradient)
        parameter.grad = view

    def _take_all(self) -> None:
        for bucket in self._buckets:
            for index in range(len(bucket.parameters)):
                self._take(bucket, index)

    def _start_full_buckets(self) -> None:
        # In one order on all ranks, whatever order their gradients came in.
        while self._next < len(self._buckets) and self._waiting[self._next] <= 0:
            self._buckets[self._next].start(self._scale(), self._weighting.samples)
            self._next += 1

    def _scale(self) -> float | None:
        """By what gradients are multiplied before the mean over ranks; None: as they are."""
        return self._weighting.scale(self._accumulate)

    def _start_rest(self) -> None:
        """Reduce all that is not being reduced yet."""
        for bucket in self._buckets[self._next :]:
            bucket.complete()
        self._waiting = [0] * len(self._buckets)
        self._start_full_buckets()

    def _after_backward(self) -> None:
        if self._reduces():
            self._start_rest()
            if self._overlap_step and self._size > 1:
                # Where a parameter had no part here, it is known when all is there whether it has a gradient.
                known = max((n for n, bucket in enumerate(self._buckets, 1) if bucket.unused), default=0)
                for number in range(known):
                    self._finish_bucket(number)
                for bucket in self._buckets[known:]:
                    bucket.arrives(self.finish)
                _underway.add(self)
            else:
                self.finish()
        self._end_pass()

    def _end_pass(self) -> None:
        self._passes += 1
        self._weighting.end_pass(self._passes % self._accumulate == 0)
        self._begin_pass()

    def end_failed_pass(self) -> bool:
        """Where backpropagation raised, take part in what the other ranks reduce; whether that was so."""
        # The engine keeps what it calls in the end as long as it is at work.
        if not self._in_backward or self._ending() is not None:
            return False
        reduces = self._reduces()
        if reduces:
            self._start_rest()
            self.finish()
        self._end_pass()
        return reduces

    def finish(self) -> None:
        """Wait for all gradients that travel."""
        for number in range(len(self._buckets)):
            self._finish_bucket(number)

    def _finish_bucket(self, number: int) -> None:
        bucket = self._buckets[number]
        with self._finishing:
            if not bucket.finish():
                return
            if number == 0:
                self._weighting.correct(bucket)
            if self._weighting.correction != 1.0:
                bucket.rescale(self._weighting.correction)

    # -- the optimizer

    def _before_step(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Have the gradients that the step needs, or let its closure have them."""
        # Of optimizer.step(closure), with the optimizer in the first place.
        closure = keywords["closure"] if "closure" in keywords else (*arguments, None)[1]
        if not callable(closure):
            self._have_gradients()
            return None

        def closed() -> Any:
            loss = closure()
            self._have_gradients()
            return loss

        if "closure" in keywords:
            return arguments, keywords | {"closure": closed}
        return (arguments[0], closed, *arguments[2:]), keywords

    def _have_gradients(self) -> None:
        """All passes for a step were made."""
        self.end_window()
        if self._in_backward and self._holds:
            raise inner_step()
        self._early = False
        if self._clip_norm is not None:
            self._clip(self._clip_norm)

    def end_window(self) -> bool:
        """Where fewer passes than were announced are to make a step, reduce what they made; whether so."""
        self.settle()
        self.end_failed_pass()
        if self._in_backward or not self._is_within():
            return False
        self._weighting.end_early()
        self._take_all()
        self._start_rest()
        self.finish()
        self._begin_window()
        self._begin_pass()
        return True

    def end_window_of(self, parameters: list[torch.Tensor]) -> None:
        """The same, if some of these are among its parameters: somebody changes their gradients."""
        if any(id(parameter) in self._place for parameter in parameters) and self.end_window():
            self._early = True

    def begin_window_of(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of this optimizer are forgotten."""
        if optimizer is self._optimizer:
            self.end_failed_pass()
            if not self._in_backward:
                self._begin_window()

    def end_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of this optimizer was made, or was left out on all ranks."""
        self._early = self._early and optimizer is not self._optimizer

    def _begin_window(self) -> None:
        """The pass that comes is the first one for a step."""
        self._passes, self._early = 0, False
        self._weighting.begin_window()

    def _clip(self, norm: float) -> None:
        if self._shards:
            self._shards.clip(norm)
            return
        nn.utils.clip_grad_norm_(self._parameters, norm)

    def _overlap(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer update the parameters bucket by bucket."""
        if "step" in vars(optimizer):
            raise InvalidCall(
                "The optimizer's step was already replaced, by a learning-rate scheduler maybe.",
                "Call parallelize before you make the scheduler, or leave overlap_step out.",
            )
        parts = lambda: (self._place, len(self._buckets))  # noqa: E731
        self._hooks.append(step_in_parts(optimizer, parts, self._finish_bucket, self.finish))


_BeforeForward = BeforeForward  # its name in models that were saved earlier
_underway: "weakref.WeakSet[Parallel]" = weakref.WeakSet()  # with gradients that may still travel


@atexit.register
def _finish_all() -> None:
    """Wait for what still travels, which other ranks may wait for."""
    for parallel in list(_underway):
        with contextlib.suppress(Exception):  # anyone who needs it hears of it
            parallel.finish()
            parallel.settle()


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _no_model() -> None:
    """Stands for a weak reference to what is gone."""
