"""The calls of a functional model in a row, with those of the models in it."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.functional import functional, functional_of, mask_of
from carme_runtime.keras.layers import SplitLayer
from carme_runtime.keras.library import keras


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a layer, or of another operation of Keras.

    Args:
        number: In the order in which Keras makes the calls.
        operation: What is called.
        node: Keras' record of the call.
        sources: Numbers of the values that it takes, by the identities of Keras' symbols for them.
        masks: Of these symbols, masks that Keras recorded as arguments by itself, and whose they are.
        outputs: Numbers of the values that it makes.
    """

    number: int
    operation: Any
    node: Any
    sources: dict[int, int]
    masks: dict[int, int]
    outputs: list[int]

    @property
    def is_mark(self) -> bool:
        """Whether a stage ends before it."""
        return isinstance(self.operation, SplitLayer)

    @property
    def layers(self) -> list[Any]:
        """The layer, and those in it."""
        return list(self.operation._flatten_layers()) if isinstance(self.operation, keras.Layer) else []

    def call(self, values: dict[int, Any], training: bool) -> list[Any]:
        """Call it with values by the identities of symbols; what it makes. Those left out are None."""
        arguments, keywords = self.node.arguments.fill_in(values)
        result = functional.operation_fn(self.operation, training=training)(*arguments, **keywords)
        return keras.tree.flatten(result)


@dataclass
class Flattened:
    """The calls of a model; values have numbers.

    Args:
        inputs: Of the model.
        results: Of the model.
        steps: In the order in which Keras makes them.
        entered: Models in it whose calls are among `steps`: the first of these, and the value whose recorded
            mask the model takes.
    """

    inputs: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    entered: list[tuple[int, int]] = field(default_factory=list)
    _values: int = 0

    def value(self) -> int:
        """The number of another value."""
        self._values += 1
        return self._values - 1

    def carrying(self, passed: Collection[int]) -> "Flattened":
        """The same, with masks beside the values instead of as arguments.

        Args:
            passed: Numbers of the calls that get their recorded masks as arguments nevertheless.
        """
        steps, needed = [], set(self.results)
        for step in reversed(self.steps):
            if step.number not in passed:
                sources = {s: value for s, value in step.sources.items() if s not in step.masks}
                step = dataclasses.replace(step, sources=sources, masks={})
            if isinstance(step.operation, keras.Layer) or needed.intersection(step.outputs):
                needed.update(step.sources.values())
                steps.append(step)
        return Flattened(self.inputs, self.results, steps[::-1], self.entered, self._values)


def flattened(model: Any) -> Flattened:
    """The calls of a functional model. Raises InvalidCall for results that a pipeline cannot return."""
    found = Flattened()
    found.inputs = [found.value() for _ in model.inputs]
    found.results = _add(found, model, found.inputs)
    if len(set(found.results)) < len(found.results) or set(found.results) & set(found.inputs):
        raise InvalidCall(
            "The model returns an input, or one value twice, which a pipeline cannot.",
            "Return each computed value once.",
        )
    return found


def _add(found: Flattened, model: Any, inputs: list[int]) -> list[int]:
    known = dict(zip(map(id, model.inputs), inputs, strict=True))
    by_depth = model._nodes_by_depth
    for depth in sorted(by_depth, reverse=True):  # as Keras itself runs them
        for node in by_depth[depth]:
            if node.is_input or any(id(t) not in known for t in node.arguments.keras_tensors):
                continue
            known |= zip(map(id, node.outputs), _added(found, node, known), strict=True)
    return [known[id(t)] for t in model.outputs]


def _added(found: Flattened, node: Any, known: dict[int, int]) -> list[int]:
    operation = node.operation
    inner = functional_of(operation) if isinstance(operation, keras.Model) else None
    sources = {id(t): known[id(t)] for t in node.arguments.keras_tensors}
    masks = _recorded_masks(node)
    plain = [value for symbol, value in sources.items() if symbol not in masks]
    if inner is not None and len(plain) == len(inner.inputs):
        found.entered += [(len(found.steps), sources[symbol]) for symbol in masks.values()]
        return _add(found, inner, plain)
    outputs = [found.value() for _ in node.outputs]
    found.steps.append(Step(len(found.steps), operation, node, sources, masks, outputs))
    return outputs


def _recorded_masks(node: Any) -> dict[int, int]:
    """The mask of the only input, where Keras recorded it as an argument. See `Step`."""
    arguments, keywords = node.arguments.args, node.arguments.kwargs
    mask = keywords.get("mask")
    if len(arguments) != 1 or not isinstance(mask, keras.KerasTensor) or mask is arguments[0]:
        return {}
    own = mask_of(arguments[0]) if isinstance(arguments[0], keras.KerasTensor) else None
    return {id(mask): id(arguments[0])} if own is not None and _alike(mask, own) else {}


def _alike(symbol: Any, candidate: Any) -> bool:
    """Whether two symbols are the same value. Copies of a model compute masks anew, which nobody uses."""
    if symbol is candidate:
        return True
    histories: list[Any] = [getattr(each, "_keras_history", None) for each in (symbol, candidate)]
    if any(history is None or isinstance(history.operation, keras.Layer) for history in histories):
        return False
    (first, place), (second, another) = ((h.operation, h.tensor_index) for h in histories)
    if place != another or type(first) is not type(second) or _settings(first) != _settings(second):
        return False
    nodes = [h.operation._inbound_nodes[h.node_index].arguments for h in histories]
    sources = [arguments._flat_arguments for arguments in nodes]
    return len(sources[0]) == len(sources[1]) and all(
        _alike(left, right) if isinstance(left, keras.KerasTensor) else repr(left) == repr(right)
        for left, right in zip(*sources, strict=True)
    )


def _settings(operation: Any) -> dict[str, str]:
    return {n: repr(v) for n, v in vars(operation).items() if not n.startswith("_") and n != "name"}
