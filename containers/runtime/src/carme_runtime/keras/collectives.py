"""Groups of ranks and their collectives by Tarantella's names, for scripts that call them directly."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from carme_runtime.collectives import Pending
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.collectives.group import TYPES
from carme_runtime.keras.world import World, world

# What the core reduces in the place of types that it does not know, with room for sums of many ranks.
_WIDER = {
    "int8": "int32", "int16": "int32", "uint16": "int32", "uint32": "int64", "uint64": "int64",
    "bool": "int32",
}  # fmt: skip


class ReductionOp(enum.Enum):
    """How elements are reduced; AND and OR ask which are not zero."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PROD = "product"
    AND = "all"
    OR = "any"


class Group:
    """Some of the ranks, which do something together; all of them make it, in the same order.

    Args:
        ranks: Their numbers; None: all ranks of the run.

    Raises:
        InvalidCall: Numbers that there are not, or this rank's not among them.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        run = world()
        known = list(range(run.size))
        self.ranks = known if ranks is None else sorted(ranks)
        self.world: World = run if self.ranks == known else run.subset(self.ranks)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return self.world.rank

    def contains(self, rank: int) -> bool:
        """Whether a rank of the run is one of them."""
        return rank in self.ranks


class Barrier:
    """A point that ranks leave together."""

    def __init__(self, group: Group | None = None) -> None:
        self._world = group.world if group else world()

    def execute(self) -> None:
        """Wait for all ranks of the group."""
        self._world.barrier()

    synchronize = execute


class Allreduce:
    """A reduction of vectors of one length and type, which can be repeated.

    Args:
        group: Of the ranks that take part.
        nelems: Elements of the vector.
        op: How they are reduced.
        algorithm: Of no meaning: the core chooses.
        dtype: Type of the elements, in Python or NumPy.
    """

    def __init__(
        self,
        group: Group | None = None,
        nelems: int = 1,
        op: ReductionOp = ReductionOp.SUM,
        algorithm: str = "",
        dtype: Any = float,
    ) -> None:
        self._world = group.world if group else world()
        self._count, self._op, self._type = nelems, op, np.dtype(dtype)
        self._under_way: tuple[np.ndarray, Pending | None] | None = None

    def start(self, values: Any) -> None:
        """Begin to reduce what this rank has."""
        array = np.asarray(values, self._type).reshape(-1)
        if array.size != self._count:
            raise InvalidCall(
                f"Allreduce was made for {self._count} elements, and got {array.size}.", "Make another one."
            )
        if self._under_way:
            raise InvalidCall("The reduction before has not ended.", "Call wait_for_completion first.")
        of_bits = self._op in (ReductionOp.AND, ReductionOp.OR)
        # A copy, which the core changes.
        wide = np.array(array != 0, "int32") if of_bits else widened(array)
        name = {ReductionOp.AND: "min", ReductionOp.OR: "max"}.get(self._op, self._op.value)
        self._under_way = wide, self._world.begin(wide, name)

    def wait_for_completion(self) -> np.ndarray:
        """The result, a vector of this rank's own."""
        if not self._under_way:
            raise InvalidCall("No reduction is under way.", "Call start first.")
        wide, pending = self._under_way
        self._under_way = None
        if pending:
            pending.wait()
        return wide.astype(self._type)


def widened(array: np.ndarray) -> np.ndarray:
    """A copy of a type that the core reduces. Raises InvalidCall where there is none."""
    name = array.dtype.name
    if name not in TYPES and name not in _WIDER:
        raise InvalidCall(
            f"Elements of type {name} cannot be reduced.",
            f"Convert to one of {', '.join([*TYPES, *_WIDER])}.",
        )
    return np.array(array, _WIDER.get(name, array.dtype), order="C")
