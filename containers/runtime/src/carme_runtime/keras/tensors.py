"""Numbers, arrays and tensors, alone or in lists and dictionaries, over all ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.collectives import Group, widened
from carme_runtime.keras.library import keras
from carme_runtime.keras.world import MASTER, World, world


class _Tensors:
    """Inputs of one structure and one shape each, given at first as an example."""

    def __init__(self, inputs: Any, group: Group | None = None) -> None:
        keras.tree.map_structure(_array, inputs)  # what cannot be sent is refused here
        self._example, self._described = inputs, _describe(inputs)
        self._world: World = group.world if group else world()

    def _each(self, inputs: Any, operation: Callable[[np.ndarray], np.ndarray]) -> Any:
        if _describe(inputs) != self._described:
            raise InvalidCall(
                f"{type(self).__name__} was made for {self._described}, and got {_describe(inputs)}.",
                "Give inputs of the same structure, shapes and types, or make another one.",
            )
        return keras.tree.map_structure(lambda leaf: _as_before(operation(_array(leaf)), leaf), inputs)


class TensorAllreducer(_Tensors):
    """Sums over all ranks."""

    def allreduce(self, inputs: Any) -> Any:
        """The sums, in the structure of the inputs, which stay as they are."""
        return self._each(inputs, self._sum)

    def _sum(self, array: np.ndarray) -> np.ndarray:
        return self._world.add(widened(array)).astype(array.dtype)


class TensorBroadcaster(_Tensors):
    """Gives all ranks what rank `root_rank` has."""

    def __init__(self, inputs: Any, root_rank: int = MASTER, group: Group | None = None) -> None:
        super().__init__(inputs, group)
        if not 0 <= root_rank < self._world.size:
            raise InvalidCall(
                f"There is no rank {root_rank} among {self._world.size} ranks.", "Give one that there is."
            )
        self._root = root_rank

    def broadcast(self, inputs: Any = None) -> Any:
        """The root's inputs. Other ranks may leave theirs out; only their structure and shape count."""
        if inputs is None:
            if self._world.rank == self._root:
                raise InvalidCall(
                    f"broadcast was called without inputs on rank {self._root}, which is the root.",
                    "Give it there what all ranks shall get.",
                )
            inputs = self._example
        return self._each(inputs, lambda array: self._world.broadcast(array, self._root))


class TensorAllgatherer:
    """Lays what all ranks have one behind the other, along the first dimension."""

    def __init__(self, inputs: Any, group: Group | None = None) -> None:
        keras.tree.map_structure(_array, inputs)  # what cannot be sent is refused here
        self._world: World = group.world if group else world()

    def allgather(self, inputs: Any) -> Any:
        """The whole, in the structure of the inputs; numbers make a vector."""

        def gather(leaf: Any) -> Any:
            array = _array(leaf)
            whole = np.concatenate(self._world.concatenate(array.reshape(array.shape or (1,))))
            return whole if np.isscalar(leaf) else _as_before(whole, leaf)

        return keras.tree.map_structure(gather, inputs)


def _array(leaf: Any) -> np.ndarray:
    """A copy on the host."""
    array = np.array(keras.ops.convert_to_numpy(leaf) if hasattr(leaf, "shape") else leaf, order="C")
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise InvalidCall(
            f"An object of type {type(leaf).__name__} cannot be sent.", "Give numbers, arrays or tensors."
        )
    return array


def _as_before(array: np.ndarray, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return array
    if not hasattr(leaf, "shape"):
        return type(leaf)(array)
    return keras.ops.convert_to_tensor(array)


def _describe(inputs: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: f"{type(leaf).__name__}{list(getattr(leaf, 'shape', []))}", inputs
    )
