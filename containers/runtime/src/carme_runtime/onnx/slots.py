"""Memory that micro-batches use one after the other.

A new range costs more than its bytes: a file is made and removed, and the system clears each page. So a
micro-batch has a slot from when it was put into the net until its results were taken out of it, and the next
one with this slot writes into the ranges that are there. They stay mapped in each process that uses them,
which also keeps them in shared memory. Tensors of another shape than the first one of a slot, and those too
large to be kept, have ranges of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from carme_runtime.petri import Memory, Range

#: Tensors of more bytes are not kept for the next micro-batch.
MOST_BYTES = 64 << 20
#: The most slots for each worker: of a task that runs, one that waits, and results that wait to be taken.
EACH = 3


@dataclass(frozen=True)
class Slotted:
    """A tensor in a slot, as a token has it.

    Attributes:
        name: Of its range.
    """

    name: str


class Slots:
    """The ranges of slots that this process has mapped."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Range, Any]] = {}

    def array(self, memory: Memory, name: str) -> Any:
        """The array of a range of a task that has ended well. Raises PetriError where there is none."""
        if name not in self._held:
            description, file = memory.open_file(memory.locate(name)[1])
            found = Range(memory, description)
            found.adopt(file)
            self._hold(found)
        return self._held[name][1]

    def target(self, memory: Memory, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Where a tensor of a slot is to be written.

        Returns:
            An array; a new range, which is held when its task has ended well; or None: what is there has
            another shape or type, or it would be too large.
        """
        if name not in self._held and name not in memory:
            if dtype.itemsize * product_of(shape) > MOST_BYTES:
                return None
            memory_range = memory.allocate(name, shape, dtype)
            if memory.task:
                return memory_range
            self._hold(memory_range)
        array = self.array(memory, name)
        return array if array.shape == tuple(shape) and array.dtype == dtype else None

    def close(self) -> None:
        """Let go of them."""
        while self._held:
            _, (found, array) = self._held.popitem()
            del array
            found.close()

    def _hold(self, found: Range) -> None:
        self._held[found.name] = (found, found.array())


def slots_for(workers: int, sizes: Iterable[int], limit: int) -> int:
    """How many slots a run has.

    Args:
        workers: Of the run.
        sizes: Of the tensors of a micro-batch, in bytes.
        limit: Bytes that ranges may take of shared memory. Slots take at most half of them, as they stay.

    Returns:
        0 where there would not be one for each worker.
    """
    most = EACH * workers
    reused = sum(size for size in sizes if size <= MOST_BYTES)
    found = min(most, limit // 2 // reused) if reused else most
    return found if found >= workers else 0


def product_of(shape: Sequence[int]) -> int:
    """The elements of an array of this shape."""
    product = 1
    for each in shape:
        product *= each
    return product


class Bound:
    """A task whose inputs and results all lie in one slot: only its session has to run.

    Args:
        session: Of ONNX Runtime.
        binding: Of its inputs and results.
        input_names: Of the ranges of the inputs.
        results: By name, as tokens have them. An array among them is written again by each run.
        arrays: What the binding points to.
    """

    def __init__(
        self,
        session: Any,
        binding: Any,
        input_names: Sequence[str],
        results: dict[str, Any],
        arrays: Sequence[Any],
    ) -> None:
        self._session, self._binding, self._arrays = session, binding, arrays
        self.input_names, self.results = tuple(input_names), results

    def run(self) -> bool:
        """Whether it has run; not where a result has another shape now."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception:  # whatever it is: the plain way tries again, and says what is wrong
            return False
        return True


def names_of(values: Sequence[Any]) -> tuple[str, ...] | None:
    """The ranges of values that all lie in slots; None where one does not."""
    names = tuple(each.name for each in values if isinstance(each, Slotted))
    return names if len(names) == len(values) else None
