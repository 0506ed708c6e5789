"""Masks of Keras beside the values of a model in stages.

Keras attaches a mask to a tensor. What is sent from one stage to another is another tensor, so masks travel
as tensors of their own, and are attached again before each call. Which values have one shows a call of the
model with a single sample: layers also set and remove masks while they run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.flattened import Flattened, Step
from carme_runtime.keras.functional import is_plain_dropout, mask_of
from carme_runtime.keras.library import keras
from carme_runtime.keras.recurrent import stateful_layers, states_of_rows
from carme_runtime.keras.variables import SEEDS

set_mask: Any = keras.src.backend.common.masking.set_keras_mask


@dataclasses.dataclass
class Carried:
    """What a model's calls make besides values. A mask is known by the value that had it first.

    Args:
        passed: Numbers of calls that get the mask that Keras recorded as an argument.
        taken: By number of a call: the masks of symbols that have one then.
        masked: Masks that a later call, or the loss, needs.
        roots: The masks of values that a plain Dropout made of others.
        from_input: Masks that are another one; see `OutputMasks`.
        losses: Numbers of calls that add to the loss.
        changing: Layers that change variables in each call, besides seeds and moving averages.
        results: Results of the model that have a mask.
        shapes: Of values, without samples.
    """

    passed: set[int] = dataclasses.field(default_factory=set)
    taken: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    masked: set[int] = dataclasses.field(default_factory=set)
    roots: dict[int, int] = dataclasses.field(default_factory=dict)
    from_input: dict[int, int] = dataclasses.field(default_factory=dict)
    losses: set[int] = dataclasses.field(default_factory=set)
    changing: list[str] = dataclasses.field(default_factory=list)
    results: list[int] = dataclasses.field(default_factory=list)
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def takes(self, step: Step) -> dict[int, int]:
        """By symbol: the mask that is attached before the call. A plain Dropout needs none."""
        return {} if is_plain_dropout(step.operation, step.node) else self.taken.get(step.number, {})

    def makes(self, step: Step) -> list[int]:
        """Places of the outputs of a call whose masks others need."""
        return [place for place, value in enumerate(step.outputs) if value in self.masked]

    def root(self, value: int) -> int:
        """The mask of a value."""
        return self.roots.get(value, value)

    @property
    def of_results(self) -> list[int]:
        """Masks of results, each once."""
        return list(dict.fromkeys(map(self.root, self.results)))


def attach(tensors: dict[int, Any], masks: dict[int, Any]) -> None:
    """Let tensors, by any key, have these masks, and the others none."""
    for key, tensor in tensors.items():
        if masks.get(key) is not None or mask_of(tensor) is not None:
            set_mask(tensor, masks.get(key))


def carried(found: Flattened, example: Sequence[Any]) -> Carried:
    """Call a model with the first sample of an example. Its variables stay as they are.

    Args:
        found: The model, with all recorded masks.
        example: What it is called with.

    Raises:
        InvalidCall: It cannot run.
    """
    try:
        return _Trace(found).run([tensor[:1] for tensor in example])
    except InvalidCall:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = f"The model cannot run with the data ({first})."
        raise InvalidCall(problem, "Give data that fit the model.") from error


class _Trace:
    def __init__(self, found: Flattened) -> None:
        self._found, self._carried = found, Carried()
        self._values: dict[int, Any] = {}

    def run(self, inputs: list[Any]) -> Carried:
        self._values = dict(zip(self._found.inputs, inputs, strict=True))
        with keras.StatelessScope(collect_losses=True) as scope:
            for step in self._found.steps:
                self._check_entered(step)
                with states_of_rows(stateful_layers(step.layers), None):
                    self._call(step)
                if scope.losses:
                    self._carried.losses.add(step.number)
                    scope.losses.clear()
                self._note_changes(step, set(scope.state_mapping))
        carried, values = self._carried, self._values
        carried.results = [key for key in self._found.results if mask_of(values[key]) is not None]
        carried.shapes = {key: tuple(value.shape)[1:] for key, value in values.items()}
        self._keep_needed()
        return carried

    def _call(self, step: Step) -> None:
        values, carried = self._values, self._carried
        arguments = {symbol: values[key] for symbol, key in step.sources.items()}
        masks = {symbol: mask for symbol, value in arguments.items() if (mask := mask_of(value)) is not None}
        if all(owner in masks for owner in step.masks.values()):
            arguments = {symbol: value for symbol, value in arguments.items() if symbol not in step.masks}
        else:
            carried.passed.add(step.number)
        roots = {symbol: carried.root(step.sources[symbol]) for symbol in masks}
        carried.taken[step.number] = {symbol: root for symbol, root in roots.items() if symbol in arguments}
        outputs = step.call(arguments, training=True)
        for key, output in zip(step.outputs, outputs, strict=True):
            values[key] = output
            mask = mask_of(output)
            same = [roots[symbol] for symbol, taken_mask in masks.items() if taken_mask is mask]
            if mask is None:
                continue
            if is_plain_dropout(step.operation, step.node):
                carried.roots[key] = next(iter(carried.taken[step.number].values()))
            else:
                carried.masked.add(key)
                carried.from_input |= {key: same[0]} if same else {}

    def _note_changes(self, step: Step, changed: set[int]) -> None:
        for layer in step.layers:
            own = [*layer._trainable_variables, *layer._non_trainable_variables]
            averages = isinstance(layer, keras.layers.BatchNormalization)
            if not averages and any(id(v) in changed and v.name != SEEDS for v in own):
                self._carried.changing.append(step.operation.name)

    def _check_entered(self, step: Step) -> None:
        for place, value in self._found.entered:
            if place == step.number and mask_of(self._values[value]) is None:
                raise InvalidCall(
                    "A model in the model takes a mask that a layer has removed from its tensor.",
                    "Use its layers directly, or train with ParallelStrategy.DATA.",
                )

    def _keep_needed(self) -> None:
        """Leave out masks that nobody looks at."""
        carried = self._carried
        needed = set(carried.of_results)
        for step in reversed(self._found.steps):
            if not isinstance(step.operation, keras.Layer) and not needed.intersection(step.outputs):
                carried.taken[step.number] = {}
            needed.update(carried.takes(step).values())
        carried.masked &= needed


class Unknown(Exception):
    """A mask that depends on what layers with variables make."""


class OutputMasks:
    """Masks of a model's results, from its inputs alone: no variable is needed.

    Args:
        found: The model, with masks beside the values.
        carried: What its calls make besides.
    """

    def __init__(self, found: Flattened, carried: Carried) -> None:
        self._found, self._carried = found, carried
        self._maker = {key: step for step in found.steps for key in step.outputs}
        self._values: dict[int, Any] = {}
        self._masks: dict[int, Any] = {}
        self._samples = 0

    def of(self, inputs: Sequence[Any]) -> list[Any]:
        """Those of `of_results`. Raises Unknown."""
        self._values, self._masks = dict(zip(self._found.inputs, inputs, strict=True)), {}
        self._samples = len(inputs[0])
        try:
            return [self._mask(key) for key in self._carried.of_results]
        finally:
            self._values, self._masks = {}, {}

    def _mask(self, key: int) -> Any:
        if key not in self._masks:
            from_input = self._carried.from_input.get(key)
            self._masks[key] = self._computed(key) if from_input is None else self._mask(from_input)
        return self._masks[key]

    def _computed(self, key: int) -> Any:
        """The mask that a layer made of its inputs' values, or of several masks."""
        step, layers = self._maker[key], keras.layers
        kind = type(step.operation)
        if kind.__module__.startswith("keras.") and issubclass(kind, layers.Embedding | layers.Masking):
            maker = layers.Embedding if issubclass(kind, layers.Embedding) else layers.Masking
            (value,) = step.sources.values()  # other kinds of embeddings make masks like this in their calls
            return maker.compute_mask(step.operation, self._value(value), None)
        if step.masks or not kind.__module__.startswith("keras.src.layers.merging."):
            return mask_of(self._value(key))
        # Of its inputs, merging layers need the shapes only.
        symbols = {id(t): t for t in step.node.arguments.keras_tensors}
        stand_ins = {
            s: keras.ops.zeros((self._samples, *self._carried.shapes[step.sources[s]]), tensor.dtype)
            for s, tensor in symbols.items()
        }
        taken = self._carried.taken[step.number]
        masks = {symbol: self._mask(key) for symbol, key in taken.items()}
        (tensors,), _ = step.node.arguments.fill_in(stand_ins)
        (own,), _ = step.node.arguments.fill_in(masks)
        return step.operation.compute_mask(tensors, own)

    def _is_free(self, key: int) -> bool:
        """Whether a value needs no variable."""
        if key in self._values:
            return True
        step = self._maker[key]
        own = getattr(step.operation, "variables", [])
        return not own and all(self._is_free(source) for source in step.sources.values())

    def _value(self, key: int) -> Any:
        if key in self._values:
            return self._values[key]
        if not self._is_free(key):
            raise Unknown
        step = self._maker[key]
        arguments = {symbol: self._value(source) for symbol, source in step.sources.items()}
        taken = self._carried.taken.get(step.number, {})
        attach(arguments, {symbol: self._mask(source) for symbol, source in taken.items()})
        self._values |= zip(step.outputs, step.call(arguments, training=False), strict=True)
        return self._values[key]
