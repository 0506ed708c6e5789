"""Functional and sequential models as Keras records them, on any backend."""

import json
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.library import keras

T = TypeVar("T")
functional: Any = keras.src.models.functional
mask_of: Any = keras.src.backend.common.masking.get_keras_mask
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")  # attributes of layers that draw random numbers


def functional_of(model: Any) -> Any:
    """The graph of a functional or sequential model; None: it has none.

    A model with a `call` of its own has none, even where it was made of inputs and outputs.
    """
    if isinstance(model, keras.Sequential):
        return model._functional if model.built and type(model).call is keras.Sequential.call else None
    if isinstance(model, functional.Functional) and type(model).call is functional.Functional.call:
        return model
    return None


def refuse(model: Any) -> None:
    """Raise InvalidCall for what a pipeline would do otherwise than the model, which is a functional one."""
    for layer in model._flatten_layers(include_self=False):
        recurrent = isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional)
        if getattr(layer, "stateful", False) and not recurrent:
            raise InvalidCall(
                f"The layer {layer.name} keeps its state from batch to batch, and pipelines divide batches.",
                "Use stateful layers of Keras (RNN and what is made of it), stateful=False, or train with "
                "ParallelStrategy.DATA.",
            )


def draws_random(layers: Iterable[Any]) -> bool:
    """Whether one of these layers draws random numbers in training."""
    return any(_draws(layer) for layer in layers)


def _draws(layer: Any) -> bool:
    if not hasattr(layer, "seed_generator") and not hasattr(layer, "generator"):
        return False
    rates = [getattr(layer, name) for name in _RATES if isinstance(getattr(layer, name, None), int | float)]
    return any(rates) or not rates


def is_plain_dropout(operation: Any, node: Any) -> bool:
    """Whether a call's mask can be drawn for the whole batch, and multiplied with."""
    return (
        type(operation) is keras.layers.Dropout
        and 0 < operation.rate < 1
        and operation.noise_shape is None
        and len(node.arguments.keras_tensors) == 1
        and node.outputs[0].dtype == node.arguments.keras_tensors[0].dtype == operation.compute_dtype
    )


def stages_by_marks(
    nodes: list[T],
    sources: Callable[[T], Iterable[T]],
    marks: Collection[T],
    name: Callable[[T], str],
) -> list[list[T]]:
    """The nodes of each stage, where marks say between which nodes a stage ends.

    Args:
        nodes: In an order in which they can run.
        sources: Of what a node takes its inputs; others than `nodes` do not count.
        marks: The first nodes of stages; each has one source.
        name: Of a mark, for messages.

    Raises:
        InvalidCall: A mark that another connection leads around.
    """
    part = {node: node for node in nodes}

    def root(node: T) -> T:
        while part[node] is not node:
            node = part[node]
        return node

    for node in nodes:
        for source in sources(node):
            if source in part and node not in marks:
                part[root(node)] = root(source)
    stages = list(dict.fromkeys(root(node) for node in nodes))
    before: dict[T, set[T]] = {stage: set() for stage in stages}
    for mark in marks:
        for source in sources(mark):
            if source in part and root(source) is root(mark):
                raise _bypassed(name(mark))
            if source in part:
                before[root(mark)].add(root(source))
    order: list[T] = []
    while len(order) < len(stages):
        ready = [s for s in stages if s not in order and before[s] <= set(order)]
        if not ready:
            raise _bypassed(name(next(iter(marks))))
        order.append(ready[0])
    return [[n for n in nodes if root(n) is stage] for stage in order]


def _bypassed(name: str) -> InvalidCall:
    return InvalidCall(
        f"The SplitLayer {name} does not end a stage: another connection leads around it.",
        "Put a SplitLayer into each connection between the two stages.",
    )


def settings_checksum(model: Any) -> int:
    """Of the settings of all layers, such as activations and rates, but not of how weights begin.

    Layers whose settings cannot be had, or are not JSON, count as if they had none.
    """
    checksum = 0
    for layer in model._flatten_layers(include_self=False):
        try:
            config = {} if isinstance(layer, keras.Model) else layer.get_config()
            text = json.dumps(_compared(config), skipkeys=True, default=lambda value: type(value).__name__)
        except Exception:  # a layer of the script's own, whose get_config may do anything
            text = "{}"
        checksum = zlib.crc32(text.encode(), checksum)
    return checksum


def _compared(value: Any) -> Any:
    """Settings without those that may differ between ranks: layers draw their seeds in each process.

    Layers in layers, such as those of Bidirectional, have settings of their own in the wrapper's.
    """
    if isinstance(value, dict):
        return {
            name: _compared(each)
            for name, each in value.items()
            if not (isinstance(name, str) and (name == "seed" or name.endswith("initializer")))
        }
    return [_compared(each) for each in value] if isinstance(value, list | tuple) else value
