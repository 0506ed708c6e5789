"""Training that goes on after ranks or nodes were lost, with Horovod's calls.

`carme-run --max-restarts 3 train.py` starts all ranks anew, without the lost ones; what was committed before
comes from a checkpoint in a folder that carme-run names. Without it nothing is written: a loss is the end.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import copy
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from carme_runtime.checkpoint import Checkpoints
from carme_runtime.checkpoint.checkpoints import Saving
from carme_runtime.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from carme_runtime.horovod.world import init, rank, size
from carme_runtime.starts import STREAMED
from carme_runtime.torch.core_group import core_group

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class State:
    """What training goes on from. `commit_seconds`: between two checkpoints, at least."""

    commit_seconds = 10.0

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._checkpoints: Checkpoints | None = None
        self._saving: Saving | None = None
        self._written = -math.inf
        self._step = 0

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these when training goes on with another number of ranks, after the state was loaded."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Call what was registered."""
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Remember the state: training goes on from here, or from the commit before this one.

        It is written in the background, when `commit_seconds` have passed since the last time.
        """
        self.save()
        if self._checkpoints is None:
            return
        due = time.monotonic() - self._written >= self.commit_seconds
        if not broadcast_object(due):
            return
        self._written = time.monotonic()
        self._step += 1
        self._saving = self._checkpoints.save(self._step, **self._packed())

    def check_host_updates(self) -> None:
        """Nothing: carme-run itself starts the ranks anew when nodes come."""

    def save(self) -> None:
        """Remember the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was remembered in memory."""
        raise NotImplementedError

    def sync(self) -> None:
        """Load the last commit, or take rank 0's state where there is none."""
        folder = os.environ.get("CARME_ELASTIC_FOLDER")
        if folder and self._checkpoints is None:
            # Rank 0 alone reads what was committed, where the core carries it to the others.
            start = STREAMED if core_group() else ""
            self._checkpoints = Checkpoints(Path(folder), keep=2, start=start)
        loaded = self._checkpoints.load() if self._checkpoints else None
        if loaded:
            self._step, packed = loaded
            self._unpack(packed)
        else:
            self._share()
        self.save()

    def _packed(self) -> dict[str, Any]:
        """For a checkpoint; called by all ranks together."""
        raise NotImplementedError

    def _unpack(self, packed: dict[str, Any]) -> None:
        raise NotImplementedError

    def _share(self) -> None:
        """Give all ranks rank 0's state."""
        raise NotImplementedError


class ObjectState(State):
    """Values, as attributes: numbers, strings, tensors, lists and dictionaries of them."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = list(values)
        self._remembered: dict[str, Any] = {}
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def save(self) -> None:
        self._remembered = copy.deepcopy(self._values())

    def restore(self) -> None:
        self._set(copy.deepcopy(self._remembered))

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _packed(self) -> dict[str, Any]:
        return {"values": self._values()}

    def _unpack(self, packed: dict[str, Any]) -> None:
        self._set(packed["values"])

    def _share(self) -> None:
        self._set(broadcast_object(self._values()))


class TorchState(ObjectState):
    """A model, an optimizer, whatever else has `state_dict` and `load_state_dict`, and values.

    Args:
        model: None: there is none.
        optimizer: The same; DistributedOptimizer's or torch's own.
        values: Attributes of the state. Those with a state of their own keep their place and load it.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        parts = {"model": model, "optimizer": optimizer}
        parts |= {name: value for name, value in values.items() if hasattr(value, "load_state_dict")}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        for name, part in parts.items():
            setattr(self, name, part)
        self._states: dict[str, Any] = {}
        super().__init__(**{name: value for name, value in values.items() if name not in parts})

    def save(self) -> None:
        super().save()
        self._states = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def restore(self) -> None:
        super().restore()
        for name, state in self._states.items():
            self._parts[name].load_state_dict(copy.deepcopy(state))

    def _packed(self) -> dict[str, Any]:
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.gather()
        return super()._packed() | {"parts": {name: part.state_dict() for name, part in self._parts.items()}}

    def _unpack(self, packed: dict[str, Any]) -> None:
        super()._unpack(packed)
        for name, part in self._parts.items():
            part.load_state_dict(packed["parts"][name])

    def _share(self) -> None:
        super()._share()
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root_rank=0)
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part, root_rank=0)
            else:
                part.load_state_dict(broadcast_object(part.state_dict()))


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its part of what no rank has processed in this epoch.

    Call `record_batch` after each batch and `set_epoch` at the end of an epoch, and give it to `TorchState`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self._gathered: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin with all samples, in another order."""
        self.epoch = epoch
        self.processed_indices.clear()
        self._gathered.clear()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Batch number `batch_idx` since the last reset, of `batch_size` samples, was processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: list[int]) -> None:
        """These samples were processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch."""
        begin = batch_idx * batch_size
        return self.indices[begin : begin + batch_size]

    def gather(self) -> None:
        """Learn what the other ranks processed; called by all of them."""
        self._gathered = set().union(*allgather_object(self.processed_indices))

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have processed, as far as it was gathered."""
        return {"epoch": self.epoch, "processed_indices": sorted(self._gathered | self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after that."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Deal what is left out to the ranks that there are."""
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            chance = torch.Generator().manual_seed(self.seed + self.epoch)
            left = [left[place] for place in torch.randperm(len(left), generator=chance).tolist()]
        init()
        each = math.ceil(len(left) / size())
        # As many for every rank, so that all begin as many operations: the first ones are used again.
        padded = (left * size())[: each * size()] if left else []
        self.indices = padded[rank() :: size()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def run(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """For a function whose first argument is a `State`: call it with the last commit loaded."""

    @functools.wraps(func)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        state: Any = args[0] if args else kwargs["state"]
        init()
        state.sync()
        if int(os.environ.get("CARME_RESTARTS", "0")):
            state.on_reset()
        return func(*args, **kwargs)

    return wrapper
