"""An optimizer whose state and step are divided among the ranks.

The method is stage 1 of ZeRO (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, SC 2020): the mean of the gradients arrives in equal blocks, one on each rank, each rank
steps the parameters of its block, and all gather the parameters. Here blocks are those of `parallelize`'s
buckets, so ranks hold equal parts of the state however large single parameters are.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives import Group, Pending
from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.torch.arrivals import Arrivals
from carme_runtime.torch.buckets import EXTRA, Bucket, SplitPending, flat_like, view_like
from carme_runtime.torch.device_group import DeviceGroup
from carme_runtime.torch.divided import Divided
from carme_runtime.torch.stepping import without_state

__all__ = ["ShardBucket", "Shards", "check_optimizer", "shard_elements"]

_LINE = 64  # bytes; a rank's block is a multiple of it
# Each of these treats every element by itself, with the exception of what `_SCALARS` names.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_SCALARS = {"step", "mu_product", "eta", "mu"}  # state that a parameter has once
_STATE_LABEL = "optimizer.state_dict()"


def check_optimizer(optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]) -> None:
    """Raise InvalidCall for an optimizer that cannot step a part of the parameters by itself."""
    inner = _innermost(type(optimizer))
    if not any(isinstance(optimizer, kind) and inner is _innermost(kind) for kind in _ELEMENTWISE):
        raise InvalidCall(
            f"{type(optimizer).__name__} cannot be divided among the ranks: it may look at whole parameters.",
            f"Use one of {', '.join(kind.__name__ for kind in _ELEMENTWISE)}, or leave shard_optimizer out.",
        )
    if "step" in vars(optimizer):
        raise InvalidCall(
            "The optimizer's step was already replaced, by a learning-rate scheduler maybe.",
            "Call parallelize before you make the scheduler, or leave shard_optimizer out.",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise InvalidCall(
            "A differentiable step cannot be divided among the ranks.",
            "Leave differentiable or shard_optimizer out.",
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = sum(id(parameter) not in held for parameter in trained)
    if missing:
        raise InvalidCall(
            f"The optimizer does not have {missing} of the {len(trained)} parameters that the model trains.",
            "Make one optimizer of all that is trained, freeze the rest, or leave shard_optimizer out.",
        )


def _innermost(kind: Any) -> Any:
    """The step that PyTorch has wrapped, to call hooks and more."""
    return inspect.unwrap(kind.step)


def shard_elements(parameters: Sequence[nn.Parameter], size: int) -> tuple[int, int]:
    """Elements of a rank's block of a bucket of these, and of all the bucket's memory."""
    line = max(1, _LINE // parameters[0].element_size())
    gradients = sum(parameter.numel() for parameter in parameters)
    block = -(-gradients // (size * line)) * line
    return block, block * size + len(parameters) + EXTRA


@dataclass(frozen=True)
class Fragment:
    """What a rank steps of one parameter."""

    begin: int  # in the parameter, flat
    end: int
    weights: torch.Tensor
    gradient: torch.Tensor


class _ShardPlan:
    """The mean of a bucket, a block of it for each rank, and of the few numbers behind it."""

    def __init__(self, group: Group | DeviceGroup, memory: torch.Tensor, block: int, limit: int) -> None:
        end = block * group.size
        self._group, self._limit, self._blocks = group, limit, memory[:end]
        self._own = memory[block * group.index : block * (group.index + 1)]
        self._rest = group.plan_allreduce(memory[end:], "mean", limit)

    def run(self) -> None:
        """Run it now."""
        self._group.reduce_scatter(self._own, self._blocks, "mean", timeout=self._limit)
        self._rest.run()

    def start(self) -> SplitPending:
        """Begin in the background."""
        scattered = self._group.reduce_scatter(
            self._own, self._blocks, "mean", timeout=self._limit, asynchronous=True
        )
        assert scattered
        return SplitPending([scattered, self._rest.start()])


class ShardBucket(Bucket):
    """Gradients whose mean arrives in blocks, one on each rank, and their parameters.

    The parameters move into memory of the bucket's own, from which they are gathered.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        memory: torch.Tensor,
        group: Group | DeviceGroup,
        limit: int,
        inline: bool,
    ) -> None:
        self.block, _ = shard_elements(parameters, group.size)
        plan = _ShardPlan(group, memory, self.block, limit)
        super().__init__(parameters, memory, plan, inline, self.block * group.size)
        self.group, self._limit = group, limit
        self.own = slice(self.block * group.index, self.block * (group.index + 1))
        self._hidden = [Divided.of(view) for view in self.views]
        self._weights = torch.zeros(self.block * group.size, dtype=memory.dtype, device=memory.device)
        self.fragments: dict[int, Fragment] = {}  # by the number of the parameter in the bucket
        self.places: list[int] = []  # where each parameter begins
        self._parts: list[torch.Tensor] = []  # of the weights, shaped as the parameters
        begin = 0
        for index, parameter in enumerate(parameters):
            end = begin + parameter.numel()
            part = view_like(self._weights[begin:end], parameter)
            with torch.no_grad():
                part.copy_(parameter)
            parameter.data = part
            self._parts.append(part)
            low, high = max(begin, self.own.start), min(end, self.own.stop)
            if low < high:
                self.fragments[index] = Fragment(
                    low - begin, high - begin, self._weights[low:high], memory[low:high]
                )
            self.places.append(begin)
            begin = end

    def hold(self) -> None:
        """Take the parameters where something has given them other memory, as `model.double()` does.

        Raises:
            InvalidCall: They have another type, or are on another device.
        """
        # A tensor's address would have its memory there, under a limit of memory.
        memory = self._weights.untyped_storage()._cdata
        if all(parameter.untyped_storage()._cdata == memory for parameter in self.parameters):
            return
        for parameter in self.parameters:
            if (parameter.dtype, parameter.device) != (self._weights.dtype, self._weights.device):
                raise InvalidCall(
                    f"A parameter has {parameter.dtype} and is on {parameter.device} now. When the optimizer "
                    f"was divided it had {self._weights.dtype} and was on {self._weights.device}.",
                    "Call parallelize again after parameters got another type or device.",
                )
        # In new memory: a limit that began meanwhile can then take it away.
        weights = torch.zeros_like(self._weights)
        for index, parameter in enumerate(self.parameters):
            former = self._parts[index]
            part = weights.as_strided(former.shape, former.stride(), self.places[index])
            with torch.no_grad():
                part.copy_(parameter)
            parameter.data = self._parts[index] = part
        for index, fragment in self.fragments.items():
            begin = self.places[index]
            fragment.weights.data = weights[begin + fragment.begin : begin + fragment.end]
        self._weights = weights

    def arrives(self, wait: Callable[[], None]) -> None:
        """Nobody sees a gradient, whether it has arrived or not."""
        self._hide()

    def finish(self) -> bool:
        """Wait for the mean, or take it now. False: it was not begun."""
        begun = super().finish()
        if begun:
            self._hide()
        return begun

    def _hide(self) -> None:
        for parameter, view, hidden in zip(self.parameters, self.views, self._hidden, strict=True):
            if parameter.grad is view or parameter.grad is hidden:
                hidden.hide()
                parameter.grad = hidden

    def rescale(self, factor: float) -> None:
        """Multiply the gradients of this rank's block."""
        self.memory[self.own].mul_(factor)

    def offer(self) -> None:
        """Give each fragment its gradient, or none where the parameter has none."""
        for index, fragment in self.fragments.items():
            gradient = self.parameters[index].grad
            if gradient is not None and gradient is not self._hidden[index]:
                # The caller's own, and the same on all ranks.
                flat = flat_like(gradient, self.parameters[index])
                fragment.gradient.copy_(flat[fragment.begin : fragment.end])
            fragment.weights.grad = None if gradient is None else fragment.gradient

    def gather(self, asynchronous: bool) -> Pending | None:
        """Bring the parameters of all ranks' blocks to all."""
        return self.group.allgather(
            self._weights, self._weights[self.own], timeout=self._limit, asynchronous=asynchronous
        )

    def gather_state(self, entries: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The flat whole of what each rank has for its fragments; all ranks call it together."""
        whole = torch.zeros_like(self._weights, dtype=dtype)
        for index, entry in entries.items():
            begin = self.places[index] + self.fragments[index].begin
            whole[begin : begin + entry.numel()].copy_(entry.view(-1))
        flat = whole.view(torch.uint8)
        size = flat.numel() // self.group.size
        own = flat[size * self.group.index : size * (self.group.index + 1)]
        self.group.allgather(flat, own, timeout=self._limit)
        return whole


class Shards:
    """The divided optimizer: its step, and its whole state.

    Args:
        optimizer: Its class becomes one of the same name. What state it has is cut.
        buckets: In the order in which their gradients arrive.
        arrive: Wait for the gradients of one bucket.
        arrive_all: Wait for those of all.
        inline: Gather while nothing else runs, instead of in the background.
        arrivals: Of parameters, where a step returns while they travel; None: it waits for them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[ShardBucket],
        arrive: Callable[[int], None],
        arrive_all: Callable[[], None],
        inline: bool,
        arrivals: Arrivals | None,
    ) -> None:
        self._optimizer, self._kind, self._buckets = optimizer, type(optimizer), buckets
        self._arrive, self._arrive_all = arrive, arrive_all
        self._inline, self._arrivals = inline, arrivals
        self._place = {
            id(parameter): (bucket, index)
            for bucket in buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self._cut(optimizer.state)
        _become_divided(optimizer, self)

    # -- the step

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Step this rank's fragments, and gather the parameters."""
        loss = None
        self._settle()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._arrive_all()
        groups = optimizer.param_groups
        # Who asks for the optimizer's state meanwhile, as a signal's handler may, finds all of it.
        part = without_state(self._kind)
        vars(part).update(vars(optimizer))
        pending: list[tuple[ShardBucket, Pending | None]] = []
        whole: Any = self._kind.step
        whole = getattr(whole, "__wrapped__", whole)  # without what calls the hooks
        for number, bucket in enumerate(self._buckets):
            self._arrive(number)
            bucket.hold()
            bucket.offer()
            part.param_groups = self._groups(groups, bucket)
            whole(part)
            if self._arrivals is None:
                pending.append((bucket, bucket.gather(not self._inline)))
        remaining = self._groups(groups, None)  # frozen ones, unless the caller gave them a gradient
        if any(group["params"] for group in remaining):
            part.param_groups = remaining
            whole(part)
        for group, stepped in zip(groups, part.param_groups, strict=True):
            group.update((key, value) for key, value in stepped.items() if key != "params")
        vars(optimizer).update((k, v) for k, v in vars(part).items() if k != "param_groups")
        if self._arrivals is not None:
            # The first layers' parameters come last in the buckets, and are needed first.
            for bucket in reversed(self._buckets):
                gathered = bucket.gather(True)
                assert gathered
                self._arrivals.travel(bucket.parameters, gathered.wait)
        for _, gathered in pending:
            if gathered:
                gathered.wait()
        return loss

    def _settle(self) -> None:
        if self._arrivals is not None:
            self._arrivals.wait_all()

    def _groups(self, groups: list[dict[str, Any]], bucket: ShardBucket | None) -> list[dict[str, Any]]:
        """The groups with the fragments of one bucket, or with what is in none."""
        return [{**group, "params": self._fragments(group["params"], bucket)} for group in groups]

    def _fragments(self, parameters: list[nn.Parameter], bucket: ShardBucket | None) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for parameter in parameters:
            holder, index = self._place.get(id(parameter), (None, 0))
            if holder is not bucket:
                continue
            if holder is None:
                found.append(parameter)
            elif index in holder.fragments:
                found.append(holder.fragments[index].weights)
        return found

    def clip(self, limit: float) -> None:
        """Scale all gradients so that their norm is at most `limit`; all ranks call it together."""
        gradients = [
            fragment.gradient
            for bucket in self._buckets
            for index, fragment in bucket.fragments.items()
            if bucket.parameters[index].grad is not None
        ]
        norms = torch._foreach_norm(gradients) if gradients else []
        total = torch.zeros(1, dtype=torch.float64)
        for device in {norm.device for norm in norms}:  # one copy from each
            squares = [norm.double() ** 2 for norm in norms if norm.device == device]
            total += torch.stack(squares).sum().cpu()
        dist.all_reduce(total)
        factor = min(limit / (float(total.sqrt()) + 1e-6), 1.0) if bool(total.isfinite()) else float("nan")
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    # -- the state

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
        """The state of whole parameters, from all ranks, which call this together."""
        self._meet()
        described = [self._described(optimizer, bucket) for bucket in self._buckets]
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, described)
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        for number, bucket in enumerate(self._buckets):
            known: dict[int, dict[str, Any]] = {}
            for reported in by_rank:
                for index, entries in reported[number].items():
                    known.setdefault(index, entries)
            self._gather_bucket(optimizer, bucket, known, state)
        for parameter, entries in optimizer.state.items():
            if id(parameter) not in self._fragment_ids():
                state[parameter] = entries
        return state

    def _meet(self) -> None:
        """Where other ranks do something else meanwhile, say so instead of waiting for them."""
        sign = torch.zeros(self._buckets[0].group.size, dtype=torch.uint8)
        own = sign[:1].clone()
        try:
            self._buckets[0].group.allgather(sign, own, label=_STATE_LABEL)
        except Mismatch as error:
            raise Mismatch(
                f"A rank called optimizer.state_dict(), and another one did not. {error.message}",
                "Call it on all ranks: the state is divided among them.",
            ) from None

    def _fragment_ids(self) -> set[int]:
        return {id(f.weights) for bucket in self._buckets for f in bucket.fragments.values()}

    def _described(self, optimizer: Any, bucket: ShardBucket) -> dict[int, dict[str, Any]]:
        """For each fragment's state: the type of what each element has, and what it has once."""
        found: dict[int, dict[str, Any]] = {}
        for index, fragment in bucket.fragments.items():
            entries = optimizer.state.get(fragment.weights)
            if entries:
                found[index] = {
                    key: value.dtype if _is_elementwise(key, value) else value
                    for key, value in entries.items()
                }
        return found

    def _gather_bucket(
        self,
        optimizer: Any,
        bucket: ShardBucket,
        known: dict[int, dict[str, Any]],
        state: dict[Any, dict[str, Any]],
    ) -> None:
        kinds = sorted(
            {(key, value) for entries in known.values() for key, value in entries.items() if _is_type(value)},
            key=str,
        )
        for key, dtype in kinds:
            held = {
                index: optimizer.state[fragment.weights][key]
                for index, fragment in bucket.fragments.items()
                if known.get(index, {}).get(key) is dtype
            }
            whole = bucket.gather_state(held, dtype)
            for index, entries in known.items():
                if entries.get(key) is dtype:
                    parameter, begin = bucket.parameters[index], bucket.places[index]
                    part = whole[begin : begin + parameter.numel()]
                    state[parameter][key] = view_like(part, parameter).clone()
        for index, entries in known.items():
            parameter = bucket.parameters[index]
            for key, value in entries.items():
                if not _is_type(value):
                    state[parameter][key] = value
            # In the order in which the optimizer has made them.
            state[parameter] = {key: state[parameter][key] for key in entries}

    def _cut(self, state: Any) -> None:
        """Keep of the state of whole parameters what belongs to this rank's fragments."""
        cut: dict[Any, dict[str, Any]] = defaultdict(dict)
        for parameter, entries in state.items():
            bucket, index = self._place.get(id(parameter), (None, 0))
            if bucket is None:
                cut[parameter] = entries
            elif index in bucket.fragments:
                fragment = bucket.fragments[index]
                cut[fragment.weights] = {
                    key: flat_like(value, parameter)[fragment.begin : fragment.end].clone()
                    if _is_elementwise(key, value)
                    else value
                    for key, value in entries.items()
                }
        self._optimizer.state = cut

    def state_dict(self, optimizer: Any) -> dict[str, Any]:
        """That of one process; all ranks call it together."""
        self._arrive_all()
        whole = self._whole(optimizer, self.whole_state(optimizer))
        return self._kind.state_dict(whole)

    def load_state_dict(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        """Take the state of one process; this rank keeps its part of it."""
        whole = self._whole(optimizer, defaultdict(dict))
        self._kind.load_state_dict(whole, state_dict)
        optimizer.param_groups = whole.param_groups
        self._cut(whole.state)

    def _whole(self, optimizer: Any, state: Any) -> Any:
        whole: Any = without_state(self._kind)
        vars(whole).update(vars(optimizer))
        whole.state = state
        return whole

    def fuse(self, fuse: Callable[[torch.optim.Optimizer], None]) -> None:
        """Let `fuse` look at the optimizer as it will be stepped."""
        groups = self._optimizer.param_groups
        part = without_state(self._kind)
        vars(part).update(vars(self._optimizer))
        part.param_groups = [
            {**group, "params": [f for b in self._buckets for f in self._fragments(group["params"], b)]}
            for group in groups
        ]
        fuse(part)
        for group, fused in zip(groups, part.param_groups, strict=True):
            if "fused" in fused:
                group["fused"] = fused["fused"]

    def remove(self) -> None:
        """Give the optimizer its whole state and its class back; all ranks call it together."""
        self._optimizer.state = self.whole_state(self._optimizer)  # pyright: ignore[reportAttributeAccessIssue]
        self._optimizer.__class__ = self._kind


def _is_elementwise(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and key not in _SCALARS


def _is_type(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _become_divided(optimizer: torch.optim.Optimizer, shards: Shards) -> None:
    kind = type(optimizer)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        return shards.step(self, closure)

    def state_dict(self: Any) -> dict[str, Any]:
        return shards.state_dict(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        shards.load_state_dict(self, state_dict)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        raise InvalidCall(
            "A divided optimizer takes no more parameters.",
            "Make an optimizer of all parameters, and call parallelize again.",
        )

    def reduce(self: Any, protocol: Any) -> Any:
        raise InvalidCall(
            "A divided optimizer cannot be copied or pickled: this rank has a part of its state.",
            "Use optimizer.state_dict(), on all ranks.",
        )

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    members = {
        "step": hooked,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "add_param_group": add_param_group,
        "__reduce_ex__": reduce,
    }
    optimizer.__class__ = type(kind.__name__, (kind,), members)
