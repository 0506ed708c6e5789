"""Python objects, parameters and the state of optimizers, given to all ranks."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.horovod.handles import synchronize
from carme_runtime.horovod.notes import ALLGATHER, BROADCAST, note
from carme_runtime.horovod.operations import broadcast_, broadcast_async_
from carme_runtime.horovod.process_sets import ProcessSet, members_of
from carme_runtime.horovod.world import rank


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """The root's object, which must be one that can be pickled."""
    members = members_of(process_set)
    note(members, BROADCAST)
    reported = [obj]
    dist.broadcast_object_list(reported, src=root_rank, group=members.group)
    return reported[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """The objects of all ranks, by rank."""
    members = members_of(process_set)
    note(members, ALLGATHER)
    reported: list[Any] = [None] * members.size
    dist.all_gather_object(reported, obj, members.group)
    return reported


def broadcast_parameters(
    params: dict[str, Any] | Iterable[tuple[str, torch.Tensor] | torch.Tensor], root_rank: int = 0
) -> None:
    """Give all ranks the root's values, in place.

    `params`: what `state_dict()`, `named_parameters()` or `parameters()` gives.
    """
    if not isinstance(params, dict) and not isinstance(params, Iterable):
        raise InvalidCall(
            f"broadcast_parameters got a {type(params).__name__}.",
            "Give model.state_dict(), model.named_parameters() or model.parameters().",
        )
    entries: Any = sorted(params.items()) if isinstance(params, dict) else params
    # A parameter could be taken apart into rows as a pair is into name and tensor.
    pairs = (entry if isinstance(entry, tuple) else (None, entry) for entry in entries)
    handles = [
        broadcast_async_(tensor, root_rank, name)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None
) -> None:
    """Give all ranks the root's optimizer state: learning rates, momenta and so on. `model` has no effect."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidCall("The state of LBFGS cannot be broadcast.", "Use another optimizer.")
    state = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    skeleton = broadcast_object(_take_out(state, tensors) if rank() == root_rank else None, root_rank)
    if rank() != root_rank:
        tensors.clear()
        state = _put_in(skeleton, tensors)
    for tensor in tensors:
        broadcast_(tensor, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _Place:
    """Where a tensor was in a state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.kind = tuple(tensor.shape), tensor.dtype, tensor.device.type

    def empty(self) -> torch.Tensor:
        device = f"cuda:{torch.cuda.current_device()}" if self.kind == "cuda" else self.kind
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _take_out(state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return _Place(state)
    if isinstance(state, dict):
        return {key: _take_out(value, tensors) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_take_out(value, tensors) for value in state)
    return state


def _put_in(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(skeleton, _Place):
        tensors.append(skeleton.empty())
        return tensors[-1]
    if isinstance(skeleton, dict):
        return {key: _put_in(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list | tuple):
        return type(skeleton)(_put_in(value, tensors) for value in skeleton)
    return skeleton
