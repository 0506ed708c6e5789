"""The ranks that train one Keras model, and what they send each other besides gradients."""

# torch need not be installed where this is checked.
# pyright: reportMissingImports=false

import atexit
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from carme_runtime.collectives import Group, Pending, forms
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.collectives.group import TYPES
from carme_runtime.collectives.mailboxes import Box, Mailboxes, free_dropped
from carme_runtime.gaspi import launchers
from carme_runtime.graph import Links
from carme_runtime.keras.library import keras
from carme_runtime.logs import KERAS_EVERYWHERE
from carme_runtime.pipeline.messages import links_of

MASTER = 0
_LIMIT = 30 * 60 * 1000  # milliseconds, as torch has it


class World:
    """All ranks of the run.

    Args:
        group: None where there is one rank.
        limit: Milliseconds after which what they do together is given up; -1: never.
    """

    def __init__(self, group: Group | None, limit: int = -1) -> None:
        self._group, self._limit = group, limit
        self.rank = group.index if group else 0
        self.size = group.size if group else 1
        self.stages = 1  # that many ranks, which follow each other, share the layers of a model
        self.divides = True  # batches; if not, all ranks read all samples

    @property
    def replicas(self) -> int:
        """How many ranks, or pipelines of several of them, work on a share of a batch each."""
        return self.size // self.stages

    @property
    def replica(self) -> int:
        """The number of this rank's one."""
        return self.rank // self.stages

    @property
    def parts(self) -> int:
        """Into how many shares a batch is divided where it is read."""
        return self.replicas if self.divides else 1

    @property
    def part(self) -> int:
        """The number of this rank's share."""
        return self.replica if self.divides else 0

    def for_stages(self) -> "World":
        """The same ranks, for a model that is cut into stages."""
        return World(self._group, self._limit)

    @property
    def is_master(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == MASTER

    @property
    def prints(self) -> bool:
        """Whether this rank prints: the master rank, or all where that is requested."""
        return self.is_master or wanted(KERAS_EVERYWHERE)

    def subset(self, ranks: list[int]) -> "World":
        """The same for some of the ranks, which call this together. Raises InvalidCall."""
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            raise InvalidCall(
                f"A group cannot be {ranks} in a run of {self.size} ranks.",
                f"Name ranks from 0 to {self.size - 1}, each once.",
            )
        if self.rank not in ranks:
            raise InvalidCall(f"Rank {self.rank} is not in {ranks}.", "Make a group on its members only.")
        return World(self._group.of_some(ranks, self._limit) if self._group else None, self._limit)

    def lane(self) -> tuple[Group, int]:
        """A group of the same ranks for calls in an order of their own, and their limit in milliseconds.

        All ranks call this together; there are several.
        """
        assert self._group is not None
        return self._group.of_some(list(range(self.size)), self._limit), self._limit

    def links(self, copying_us: Callable[[int], float]) -> Links:
        """What messages between ranks cost. See `links_of`."""
        return links_of(self._group, self.rank, copying_us)

    def nodes(self) -> list[int]:
        """By rank: the number of its node."""
        if not self._group:
            return [0]
        return [self._group.context.node_of(rank) for rank in self._group.ranks]

    def tidy_mailboxes(self) -> None:
        """Give up the memory of mailboxes that nobody has any more. All ranks call it together."""
        if self._group:
            free_dropped(self._group.context, self._group, self._limit)

    def mailboxes(self, boxes: dict[Any, Box]) -> Mailboxes | None:
        """Boxes between these ranks, which make them together and use the group for nothing else meanwhile.

        None: there is one rank.
        """
        group = self._group
        return Mailboxes(group.context, group, boxes, self._limit) if group else None

    def begin(self, array: np.ndarray, op: str) -> Pending | None:
        """Begin to reduce an array in place; None: it is done."""
        if not self._group:
            return None
        return self._group.allreduce(array, op, timeout=self._limit, asynchronous=True)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._group:
            self._group.barrier(self._limit)

    def add(self, array: Any, label: str = "") -> Any:
        """The sum over all ranks, in place; `array` is a NumPy array or a torch tensor on the host."""
        if self._group:
            self._group.allreduce(array, label=label, timeout=self._limit)
        return array

    def broadcast(self, array: Any, root: int = MASTER, label: str = "") -> Any:
        """What rank `root` has, in place."""
        if self._group:
            label = f"{label} {_form(array, array.shape)}".strip()
            self._group.broadcast(_sendable(array).reshape(-1), root, label=label, timeout=self._limit)
        return array

    def concatenate(self, array: np.ndarray, label: str = "") -> list[np.ndarray]:
        """The arrays of all ranks, by rank; they may differ in their first dimension."""
        if not self._group:
            return [array]
        heads = self.table([len(array)])[:, 0]
        own = _sendable(np.ascontiguousarray(array).reshape(-1))
        row = int(np.prod(array.shape[1:], dtype=np.int64)) * array.itemsize // own.itemsize
        counts = [int(head) * row for head in heads]
        label = (
            f"{label} {_form(array, (2, *array.shape[1:]))}".strip()
        )  # ranks may have other numbers of rows
        gathered = np.empty(sum(counts), own.dtype)
        self._group.allgather(gathered, own, counts, label=label, timeout=self._limit)
        parts = np.split(gathered, np.cumsum(counts)[:-1])
        return [
            part.view(array.dtype).reshape(head, *array.shape[1:])
            for part, head in zip(parts, heads, strict=True)
        ]

    def table(self, row: list[int]) -> np.ndarray:
        """The rows of all ranks, which are of one length."""
        own = np.array(row, np.int64)
        if not self._group:
            return own[None]
        rows = np.empty(self.size * own.size, np.int64)
        self._group.allgather(rows, own, timeout=self._limit)
        return rows.reshape(self.size, own.size)

    def exchange(self, entry: Any) -> list[Any]:
        """What all ranks have, by rank. Ranks trust each other: they hold the key of one job."""
        if not self._group:
            return [entry]
        own = np.frombuffer(pickle.dumps(entry), np.uint8)
        return [pickle.loads(part.tobytes()) for part in self.concatenate(own)]

    def agree(
        self,
        values: dict[str, Any],
        problem: Exception | None = None,
        remedy: str = "Give the same on all ranks; they run one script on one data set.",
    ) -> None:
        """See that all ranks do the same, and that none of them is in trouble.

        Args:
            values: Names and values that must be equal on all ranks.
            problem: What went wrong here.
            remedy: What to do where ranks differ.

        Raises:
            InvalidCall: On every rank, where ranks differ or another rank has a problem.
            Exception: `problem` itself, on the rank that has it.
        """
        entries = self.exchange((values, f"{type(problem).__name__}: {problem}" if problem else ""))
        if problem:
            raise problem
        troubled = [(rank, text) for rank, (_, text) in enumerate(entries) if text]
        if troubled:
            raise InvalidCall(
                f"{ranks([rank for rank, _ in troubled])} cannot go on: {troubled[0][1]}",
                "Put that right; the other ranks only wait for it.",
            )
        for name in values:
            by_rank = [values_of_rank.get(name) for values_of_rank, _ in entries]
            differing = [rank for rank, value in enumerate(by_rank) if value != by_rank[0]]
            if differing:
                raise InvalidCall(
                    f"{name} is {by_rank[0]} on rank 0, but {by_rank[differing[0]]} on "
                    f"{ranks(differing, small=True)}.",
                    remedy,
                )

    def together(self, action: Callable[[], Any], **values: Any) -> None:
        """Do something that can fail on one rank; go on when it has worked on all. See `agree`."""
        problem: Exception | None = None
        try:
            action()
        except Exception as error:
            problem = error
        self.agree(values, problem)

    def write(self, action: Callable[[], Any], everywhere: bool = False) -> None:
        """Write files on the master rank, or on all; they are complete when this returns on any rank."""
        self.together(action if everywhere or self.is_master else lambda: None, call="save")


def ranks(numbers: list[int], small: bool = False) -> str:
    """Ranks in a sentence; with `small` in the middle of one."""
    text = ", ".join(str(number) for number in numbers)
    return f"{'r' if small else 'R'}ank{'s' if len(numbers) > 1 else ''} {text}"


def wanted(variable: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")


_world: World | None = None


def world() -> World:
    """The ranks of this run; joins them at the first call."""
    global _world
    if _world is None:
        _world = World(*_join())
    return _world


def init(devices_per_node: int | None = None) -> None:
    """Join the other ranks. Everything that needs them does so by itself; older scripts call this.

    Args:
        devices_per_node: Of no meaning: how many ranks a node has says `carme-run`, and each takes its GPU.
    """
    world()


def get_rank() -> int:
    """The number of this rank, from 0."""
    return world().rank


def get_size() -> int:
    """The number of ranks."""
    return world().size


def get_master_rank() -> int:
    """The number of the rank that writes files and prints."""
    return MASTER


def is_master_rank() -> bool:
    """Whether this is the rank that writes files and prints."""
    return world().is_master


def _join() -> tuple[Group | None, int]:
    launchers.complete()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, -1
    if keras.backend.backend() == "torch":
        return _join_by_torch()
    from carme_runtime import gaspi

    process = gaspi.init()
    atexit.register(process.close)
    return process.group_all, _LIMIT


def _join_by_torch() -> tuple[Group, int]:
    import torch.distributed as dist

    from carme_runtime.torch import backend
    from carme_runtime.torch.parallel import join_run

    join_run()
    group = dist.group.WORLD
    if not isinstance(group, backend.ProcessGroupCarme):
        raise InvalidCall(
            f"torch.distributed was started with the backend {dist.get_backend()}.",
            f'Use init_process_group("{backend.NAME}"), or leave it to carme_runtime.keras.',
        )
    return group.another_group()[1], group.limit


def _form(array: np.ndarray, shape: tuple[int, ...]) -> str:
    """What ranks compare of an array besides the core's type and the number of elements."""
    known = "" if array.dtype.name in TYPES else array.dtype.name
    return f"{known} {forms.shape(tuple(shape))}".strip()


def _sendable(array: np.ndarray) -> np.ndarray:
    """The same memory, as bytes where the core does not know its type; objects it refuses."""
    known = array.dtype.name in TYPES or array.dtype.hasobject
    return array if known else array.reshape(-1).view(np.uint8)
