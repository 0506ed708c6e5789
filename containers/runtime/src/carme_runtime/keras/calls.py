"""A Keras model as calls of its layers in a row, for backends whose layers are not modules of PyTorch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph, Operator, Parameter, Value
from carme_runtime.keras.functional import (
    draws_random,
    functional,
    functional_of,
    is_mark,
    is_plain_dropout,
    refuse,
    stages_by_marks,
)
from carme_runtime.keras.library import keras
from carme_runtime.keras.variables import SEEDS


@dataclass(eq=False)
class Call:
    """One call of a layer, or of another operation of Keras.

    Args:
        name: In the graph.
        operation: What is called.
        node: Keras' record of the call.
        given: Names of the values that it takes, by the identities of Keras' symbols for them.
        outputs: Names of the values that it makes.
        variables: Names of the variables that it uses.
        mark: Whether it is a SplitLayer.
        order: In which one process makes the calls.
    """

    name: str
    operation: Any
    node: Any
    given: dict[int, str]
    outputs: list[str]
    variables: list[str]
    mark: bool
    order: int = 0
    is_dropout: bool = field(init=False)

    def __post_init__(self) -> None:
        symbols = self.node.outputs[0].shape[1:]
        self.is_dropout = is_plain_dropout(self.operation, self.node) and None not in symbols

    @property
    def layers(self) -> list[Any]:
        """The layer, and those in it."""
        return list(self.operation._flatten_layers()) if isinstance(self.operation, keras.Layer) else []

    @property
    def normalises_batches(self) -> bool:
        """Whether it looks at the whole batch in training."""
        return any(isinstance(one, keras.layers.BatchNormalization) and one.trainable for one in self.layers)

    @property
    def draws_otherwise(self) -> bool:
        """Whether it draws other random numbers for micro-batches than for a batch."""
        return not self.is_dropout and draws_random(self.layers)

    def run(self, values: dict[str, Any], training: bool) -> list[Any]:
        """Call it with the values that it takes; what it makes."""
        known = {symbol: values[name] for symbol, name in self.given.items()}
        arguments, keywords = self.node.arguments.fill_in(known)
        result = functional.operation_fn(self.operation, training=training)(*arguments, **keywords)
        return keras.tree.flatten(result)


class Calls:
    """The calls of a model.

    Args:
        model: Functional or sequential, and built.

    Raises:
        InvalidCall: It has what a pipeline cannot run.
    """

    def __init__(self, model: Any) -> None:
        self._functional = functional_of(model)
        assert self._functional is not None
        refuse(self._functional)
        self.variables: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # of variables, by identity
        self.inputs = [f"input_{place}" for place in range(len(self._functional.inputs))]
        self.calls: list[Call] = []
        self.results = self._run(self._functional, self.inputs)
        if len(set(self.results)) < len(self.results) or set(self.results) & set(self.inputs):
            raise InvalidCall(
                "The model returns an input, or one value twice, which a pipeline cannot.",
                "Return each computed value once.",
            )
        self._sort()

    @property
    def symbols(self) -> Sequence[Any]:
        """Keras' symbols for the inputs."""
        return self._functional.inputs

    def inputs_of(self, x: Any) -> list[Any]:
        """What `fit` and its like get, as the tensors that the model takes. Raises InvalidCall."""
        flat = self._functional._standardize_inputs(x)
        if any(tensor is None for tensor in flat):
            raise InvalidCall("An input of the model is None.", "Give all inputs: pipelines need them.")
        return list(flat)

    def outputs_of(self, outputs: list[Any]) -> Any:
        """The results, as the model returns them."""
        packed = keras.tree.pack_sequence_as(self._functional._outputs_struct, outputs)
        return functional.unpack_singleton(packed)

    def graph(self) -> Graph:
        """The graph, without sizes and times."""
        values = [Value(name, (), "", 0, False, False) for name in self.inputs]
        values += [Value(name, (), "", 0, False, False) for call in self.calls for name in call.outputs]
        return Graph(
            source="keras",
            device="cpu",
            samples=0,
            inputs=tuple(self.inputs),
            results=tuple(self.results),
            values=tuple(values),
            operators=tuple(self._operators()),
            parameters=tuple(
                Parameter(name, _bytes_of(v), bool(v.trainable)) for name, v in self.variables.items()
            ),
        )

    def _operators(self) -> Iterator[Operator]:
        for call in self.calls:
            yield Operator(
                name=call.name,
                kind=type(call.operation).__name__,
                module=call.name,
                inputs=tuple(dict.fromkeys(call.given.values())),
                outputs=tuple(call.outputs),
                parameters=tuple(call.variables),
                draws_mask=call.is_dropout,
            )

    def _run(self, model: Any, inputs: list[str]) -> list[str]:
        known = dict(zip(map(id, model.inputs), inputs, strict=True))
        by_depth = model._nodes_by_depth
        for depth in sorted(by_depth, reverse=True):  # as Keras itself runs them
            for node in by_depth[depth]:
                if node.is_input or any(id(t) not in known for t in node.arguments.keras_tensors):
                    continue
                known |= zip(map(id, node.outputs), self._call(node, known), strict=True)
        return [known[id(t)] for t in model.outputs]

    def _call(self, node: Any, known: dict[int, str]) -> list[str]:
        operation = node.operation
        inner = functional_of(operation) if isinstance(operation, keras.Model) else None
        given = {id(t): known[id(t)] for t in node.arguments.keras_tensors}
        if inner is not None and len(given) == len(inner.inputs):
            return self._run(inner, list(given.values()))
        name = self._name(operation)
        several = len(node.outputs) > 1
        outputs = [f"{name}_{place}" if several else name for place in range(len(node.outputs))]
        variables = self._variables(operation, name)
        made = Call(name, operation, node, given, outputs, variables, is_mark(operation, node))
        made.order = len(self.calls)
        self.calls.append(made)
        return outputs

    def _name(self, operation: Any) -> str:
        name = re.sub(r"\W", "_", operation.name)
        known = {call.name for call in self.calls}
        numbers = (f"{name}_call{n}" for n in range(2, len(known) + 3))
        return name if name not in known else next(n for n in numbers if n not in known)

    def _variables(self, operation: Any, name: str) -> list[str]:
        """Names of an operation's variables; those of shared ones are by their first user."""
        found = []
        for place, v in enumerate(operation.variables if isinstance(operation, keras.Layer) else []):
            known = self._names.setdefault(id(v), f"{name}.{place}_{v.name}")
            self.variables[known] = v
            found.append(known)
        return list(dict.fromkeys(found))

    def _sort(self) -> None:
        """Let the calls of a stage follow each other, where SplitLayers say what a stage is."""
        maker = {name: call for call in self.calls for name in call.outputs}
        stages = stages_by_marks(
            self.calls,
            lambda call: [maker[name] for name in call.given.values() if name in maker],
            [call for call in self.calls if call.mark],
            lambda call: call.name,
        )
        self.calls = [call for stage in stages for call in stage]
        self.cut_points = [stage[0].name for stage in stages[1:]]
        self.stages = len(stages)

    def dropouts(self) -> list[Call]:
        """Plain Dropout layers, in the order in which one process draws their masks."""
        return sorted((call for call in self.calls if call.is_dropout), key=lambda call: call.order)

    def seed_of(self, call: Call) -> str:
        """The name of the variable from which a Dropout layer draws."""
        return next(name for name in call.variables if self.variables[name].name == SEEDS)


def _bytes_of(v: Any) -> int:
    count = int(np.prod(tuple(v.shape), dtype=np.int64))
    return count * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize
