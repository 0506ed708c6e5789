"""Recurrent layers that keep their states from batch to batch, where a batch is divided.

The states of a batch's rows stay where they were: a micro-batch reads and writes those of its own rows.
Each rank has one set of them, for all rows of the batch of all replicas.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.data import Share
from carme_runtime.keras.flattened import Step
from carme_runtime.keras.library import keras
from carme_runtime.keras.world import World


def stateful_layers(layers: Sequence[Any]) -> list[Any]:
    """Those that keep their states."""
    return [layer for layer in layers if isinstance(layer, keras.layers.RNN) and layer.stateful]


@contextlib.contextmanager
def states_of_rows(layers: Sequence[Any], rows: Any) -> Iterator[None]:
    """Let stateful layers read and write the states of these rows.

    Args:
        layers: Of `stateful_layers`.
        rows: Their numbers, as a tensor; None: states are zero, and none is written.
    """
    for layer in layers:
        vars(layer)["call"] = _call_of_rows(layer, layer.call, rows)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("call", None)


def _call_of_rows(layer: Any, call: Callable[..., Any], rows: Any) -> Callable[..., Any]:
    def called(sequences: Any, initial_state: Any = None, mask: Any = None, training: Any = False) -> Any:
        if initial_state is None and rows is None:
            initial_state = layer.get_initial_state(batch_size=keras.ops.shape(sequences)[0])
        elif initial_state is None:
            initial_state = keras.tree.map_structure(
                lambda v: keras.ops.take(v.value, rows, axis=0), layer.states
            )
        # As a layer that keeps nothing, and that returns its states.
        own, returns = vars(layer), layer.return_state
        own["stateful"], own["return_state"] = False, True
        try:
            output, *states = call(sequences, initial_state=initial_state, mask=mask, training=training)
        finally:
            own["stateful"], own["return_state"] = True, returns
        if rows is not None:
            pairs = zip(keras.tree.flatten(layer.states), keras.tree.flatten(states), strict=True)
            for v, state in pairs:
                new = keras.ops.cast(keras.ops.stop_gradient(state), v.dtype)
                v.assign(keras.ops.scatter_update(v.value, keras.ops.expand_dims(rows, -1), new))
        return (output, *states) if returns else output

    return called


class States:
    """The stateful layers of a model in stages.

    Args:
        steps: The calls of the model.

    Raises:
        InvalidCall: A layer that stages cannot have.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._of: dict[int, tuple[Any, int]] = {}  # layers, with the numbers of their calls
        self._first: int | None = 0
        for step in steps:
            for layer in stateful_layers(step.layers):
                if self._of.setdefault(id(layer), (layer, step.number))[1] != step.number:
                    raise InvalidCall(
                        f"The layer {layer.name} keeps its state from batch to batch, and is called at "
                        "several places, which may be in several stages.",
                        "Make a layer for each place, or train with ParallelStrategy.DATA.",
                    )

    @property
    def layers(self) -> list[Any]:
        """These layers."""
        return [layer for layer, _ in self._of.values()]

    def begin(self, share: Share | None) -> None:
        """The next batch of this rank's replica is this share; None: a whole batch. Raises InvalidCall."""
        for layer in self.layers:
            most = int(keras.tree.flatten(layer.states)[0].shape[0])
            if share is not None and share.total != most:
                raise InvalidCall(
                    f"The layer {layer.name} keeps the states of {most} samples, and the batch has "
                    f"{share.total}.",
                    f"Use batches of {most} samples only: batch_size={most}, and leave out what remains.",
                )
        self._first = 0 if share is None else share.begin if share.samples else None

    def rows(self, begin: int, size: int) -> Any:
        """Rows of the batch of all replicas, for so many of this one's; None: these do not count."""
        if self._first is None:
            return None
        return keras.ops.arange(self._first + begin, self._first + begin + size, dtype="int32")

    def spread(self, world: World, share: Share, owns: Callable[[Any], bool]) -> None:
        """Let all ranks have all states. All call it together.

        Args:
            world: The ranks.
            share: The rows of this rank's replica in the batch.
            owns: Whether this rank is the one of its replica that has a layer.
        """
        for layer in self.layers:
            for v in keras.tree.flatten(layer.states):
                value = np.array(keras.ops.convert_to_numpy(v.value), np.float64, order="C")
                own_rows = np.zeros_like(value)
                if owns(layer):
                    rows = slice(share.begin, share.begin + share.samples)
                    own_rows[rows] = value[rows]
                whole = world.add(own_rows.reshape(-1), "states of recurrent layers").reshape(value.shape)
                v.assign(whole.astype(keras.backend.standardize_dtype(v.dtype)))
