"""The core's group of all ranks, and memory that the ranks of a node reduce in place."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import gc
import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives import Group, Plan
from carme_runtime.collectives.core import segments
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import backend
from carme_runtime.torch.buckets import SplitPlan

__all__ = ["CoreGroup", "core_group"]

_SWEEP_FROM = 16  # segments in use
_LANES = 2  # buckets that travel between nodes at once


class CoreGroup:
    """The core's group of all ranks, and segments that are reduced in place.

    Args:
        context: The core's.
        limit: Milliseconds after which a reduction is given up; -1: never.
        lanes: Groups of the same ranks. Plans take turns on them: while one bucket's thread waits for a core
            that computes, or for the other node to begin, the wire still has the next bucket's bytes.
    """

    def __init__(self, context: Any, limit: int, lanes: list[Any]) -> None:
        self._context, self.limit = context, limit
        self._group, self._lanes = lanes[0], itertools.cycle(lanes)
        # The lowest number is that of Horovod's journal. The last one given back is used next, as ranks let
        # go of each other's old memory when they meet new memory under its number.
        self._free = list(range(1, segments(context)))
        self._all, self._sweep_at = len(self._free), _SWEEP_FROM

    def shared_bytes(self, count: int) -> torch.Tensor:
        """Zeros, which the ranks of a node reduce in place as long as there are segments.

        Each rank takes numbers of its own: they travel with what is reduced. One is given back when nobody
        has the memory any more, also as somebody's gradient, or what a reduction under way still needs.
        """
        self._sweep()
        number = self._allocated(count)
        if number is None:
            return torch.zeros(count, dtype=torch.uint8)
        memory = self._context.segment_array(number)
        weakref.finalize(memory, _give_back, self._context, number, self._free).atexit = False
        return torch.from_numpy(memory)[:count]

    def _allocated(self, count: int) -> int | None:
        """The number of a new segment; None: all are in use."""
        in_use = []
        try:
            while self._free:
                number = self._free.pop()
                try:
                    self._context.segment_alloc(number, count)
                except InvalidCall:  # a pipeline's messages have it
                    in_use.append(number)
                except BaseException:
                    self._free.append(number)
                    raise
                else:
                    return number
        finally:
            self._free[:0] = in_use
        return None

    def _sweep(self) -> None:
        """Look for models that nobody has any more, each time that twice as many segments are in use.

        A model and what is attached to it hold each other, and Python may look for such garbage late.
        """
        if not self._free or self._all - len(self._free) >= self._sweep_at:
            gc.collect()
            self._sweep_at = max(_SWEEP_FROM, 2 * (self._all - len(self._free)))

    def no_core_idles(self) -> bool:
        """Whether all ranks are on this node, and their threads compute on all its cores."""
        return self.on_one_node() and self._group.size * torch.get_num_threads() >= self._context.cores

    def on_one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return len({self._context.node_of(rank) for rank in self._group.ranks}) == 1

    def lane(self) -> Group:
        """The group whose turn it is."""
        return next(self._lanes)

    def plan(self, memory: torch.Tensor, gradients: int, wire: str) -> Plan | SplitPlan:
        """The repeated mean of this memory over all ranks; its first elements are the gradients."""
        lane = self.lane()
        if not wire or self.on_one_node() or memory.dtype != torch.float32:
            return lane.plan_allreduce(memory, "mean", self.limit)
        # What stands behind the gradients must arrive as it is.
        first = lane.plan_allreduce(memory[:gradients], "mean", self.limit, wire)
        return SplitPlan(first, lane.plan_allreduce(memory[gradients:], "mean", self.limit))


def _give_back(context: Any, number: int, free: list[int]) -> None:
    context.segment_delete(number)
    free.append(number)


# One for each process group: a program may leave a run and join another.
_cores: "weakref.WeakKeyDictionary[Any, CoreGroup]" = weakref.WeakKeyDictionary()


def core_group() -> CoreGroup | None:
    """None where there is one rank, or another backend than `carme` carries host tensors."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    if not isinstance(group, backend.ProcessGroupCarme):
        return None
    if group not in _cores:
        context, first = group.another_group()
        spans_nodes = len({context.node_of(rank) for rank in first.ranks}) > 1
        lanes = [first, *(group.another_group()[1] for _ in range((_LANES - 1) * spans_nodes))]
        _cores[group] = CoreGroup(context, group.limit, lanes)
    return _cores[group]
