"""Variables that still travel while the first training step runs."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from carme_runtime.keras.functional import functional_of
from carme_runtime.keras.library import keras
from carme_runtime.keras.variables import SEEDS, give_out
from carme_runtime.keras.world import MASTER, World
from carme_runtime.logs import log

__all__ = ["Streamed", "is_all_of_keras"]

_SMALL = 1 << 12  # bytes: such variables travel before, as callbacks may set learning rates meanwhile


class Streamed:
    """The master rank's values of variables that are alike on all ranks, which make it together.

    Small ones, and states of optimizers that are not zero, are there when this is made.

    Args:
        world: The ranks, which are several.
        weights: Of the model, in the order in which its layers use them.
        others: Of optimizers.
    """

    def __init__(self, world: World, weights: list[Any], state_variables: list[Any]) -> None:
        self._due: dict[int, Callable[[], None]] = {}  # by variable
        large = [v for v in weights if _bytes_of(v) > _SMALL and v.name != SEEDS]
        known = set(map(id, large))
        states = [v for v in state_variables if _bytes_of(v) > _SMALL]
        zero = world.exchange([not np.any(_value(v)) for v in states] if world.is_master else None)[MASTER]
        zeros = [v for v, is_zero in zip(states, zero, strict=True) if is_zero]
        for v in zeros if not world.is_master else ():
            v.assign(np.zeros(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)))
        known |= set(map(id, zeros))
        give_out(world, [v for v in [*weights, *state_variables] if id(v) not in known])
        # It must be there until all has arrived.
        self._group, limit = world.lane()
        for v in {id(v): v for v in large}.values():
            # A copy: the master rank may train its own meanwhile.
            value = np.array(_value(v), order="C") if world.is_master else _room(v)
            under_way = self._group.broadcast(
                value.reshape(-1).view(np.uint8), MASTER, timeout=limit, asynchronous=True
            )
            self._due[id(v)] = functools.partial(_arrive, v, value, under_way, world.is_master)
        self.variables = large

    def wait_for(self, variables: Iterable[Any]) -> None:
        """Wait for those of these that travel."""
        for v in variables:
            if arrive := self._due.get(id(v)):
                arrive()
                self._due.pop(id(v), None)

    def wait_all(self) -> None:
        """Wait for all, here or from here."""
        self.wait_for(self.variables)

    @property
    def travelling(self) -> bool:
        """Whether something does."""
        return bool(self._due)


def is_all_of_keras(model: Any) -> bool:
    """Whether each layer of a model uses its own variables only, and when it is called."""
    if functional_of(model) is not None and all(
        type(layer).__module__.partition(".")[0] == "keras" for layer in model._flatten_layers()
    ):
        return True
    log.warning(
        "The first step of %s waits for all weights: a graph of TensorFlow can wait for each layer only in "
        "functional and sequential models of Keras' own layers.",
        model.name,
    )
    return False


def _arrive(v: Any, value: np.ndarray, under_way: Any, is_master: bool) -> None:
    if under_way:
        under_way.wait()
    if not is_master:
        v.assign(value)


def _value(v: Any) -> np.ndarray:
    return keras.ops.convert_to_numpy(v.value)


def _room(v: Any) -> np.ndarray:
    value = _value(v)
    return np.empty(value.shape, value.dtype)


def _bytes_of(v: Any) -> int:
    count = int(np.prod(tuple(v.shape), dtype=np.int64))
    name = keras.backend.standardize_dtype(v.dtype)
    return count * (2 if name == "bfloat16" else np.dtype(name).itemsize)
