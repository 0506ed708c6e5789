"""What a call of a stage takes and makes besides values: masks, states of rows, and parts of the loss."""

from collections.abc import Sequence
from typing import Any

from carme_runtime.keras.flattened import Flattened, Step
from carme_runtime.keras.functional import functional, mask_of
from carme_runtime.keras.library import keras
from carme_runtime.keras.masks import Carried, attach
from carme_runtime.keras.recurrent import stateful_layers, states_of_rows


class Extras:
    """Calls a layer, or another operation, with them.

    Args:
        step: The call.
        carried: What the model's calls make besides values.
    """

    def __init__(self, step: Step, carried: Carried) -> None:
        self._step = step
        self._symbols, self._masked = list(step.sources), list(carried.takes(step))
        self._makes, self._adds = carried.makes(step), step.number in carried.losses
        self._layers = step.layers if self._adds else []
        self._stateful = stateful_layers(step.layers)

    @property
    def is_stateful(self) -> bool:
        """Whether it keeps states of rows."""
        return bool(self._stateful)

    def call(self, tensors: Sequence[Any], training: bool, rows: Any, scope: Any = None) -> list[Any]:
        """Values, masks of some of them, and what is added to the loss, for each sample, if there is any.

        Args:
            tensors: The values that it takes, in the order of `sources`, then their masks.
            training: Or evaluation.
            rows: Numbers of the rows that these samples are; None: they are none.
            scope: What collects losses, where the call changes nothing.
        """
        values = dict(zip(self._symbols, tensors, strict=False))
        attach(values, dict(zip(self._masked, tensors[len(self._symbols) :], strict=True)))
        with states_of_rows(self._stateful, rows):
            results = self._step.call(values, training)
        results += [mask_of(results[place]) for place in self._makes]
        if self._adds:
            results.append(self._added(keras.ops.shape(tensors[0])[0], scope))
        return results

    def _added(self, samples: Any, scope: Any) -> Any:
        losses = [loss for layer in self._layers for loss in layer._losses] if scope is None else scope.losses
        kind = keras.backend.floatx()
        total = sum((keras.ops.sum(keras.ops.cast(loss, kind)) for loss in losses), keras.ops.zeros((), kind))
        if scope is None:
            self._step.operation._clear_losses()
        return keras.ops.broadcast_to(total, (samples,))


def packed(model: Any, flat: list[Any], found: Flattened, carried: Carried) -> tuple[Any, Any]:
    """The outputs of a model in their structure, with masks, and what its layers add to the loss.

    Args:
        model: A functional one.
        flat: What its calls returned: results, masks of `carried.of_results`, and by samples what each of
            `carried.losses` adds.
        found: Its calls.
        carried: What they make besides values.
    """
    outputs, masks = flat[: len(found.results)], carried.of_results
    end = len(outputs) + len(masks)
    by_mask = dict(zip(masks, flat[len(outputs) : end], strict=True))
    attach(
        dict(zip(found.results, outputs, strict=True)),
        {value: by_mask[carried.root(value)] for value in carried.results},
    )
    more = [keras.ops.mean(part) for part in flat[end:]]
    structure = keras.tree.pack_sequence_as(model._outputs_struct, outputs)
    return functional.unpack_singleton(structure), sum(more) if more else None
