"""A Keras model as calls of its layers in a row, for backends whose layers are not modules of PyTorch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph, Operator, Parameter, Value
from carme_runtime.keras.extras import Extras, packed
from carme_runtime.keras.flattened import Step, flattened
from carme_runtime.keras.functional import (
    draws_random,
    functional_of,
    is_plain_dropout,
    refuse,
    stages_by_marks,
)
from carme_runtime.keras.library import keras
from carme_runtime.keras.masks import Carried
from carme_runtime.keras.recurrent import States
from carme_runtime.keras.variables import SEEDS


@dataclass(eq=False)
class Call:
    """One call of a layer, or of another operation of Keras.

    Args:
        name: In the graph.
        step: The call.
        extras: What makes it.
        sources: Names of the values that it takes, and of their masks.
        outputs: Names of the values that it makes, of their masks, and of what it adds to the loss.
        variables: Names of the variables that it uses.
        order: In which one process makes the calls.
    """

    name: str
    step: Step
    extras: Extras
    sources: list[str]
    outputs: list[str]
    variables: list[str]
    order: int = 0
    is_dropout: bool = field(init=False)

    def __post_init__(self) -> None:
        symbols = self.step.node.outputs[0].shape[1:]
        self.is_dropout = is_plain_dropout(self.step.operation, self.step.node) and None not in symbols

    @property
    def layers(self) -> list[Any]:
        """The layer, and those in it."""
        return self.step.layers

    @property
    def normalises_batches(self) -> bool:
        """Whether it looks at the whole batch in training."""
        return any(
            isinstance(layer, keras.layers.BatchNormalization) and layer.trainable for layer in self.layers
        )

    @property
    def draws_otherwise(self) -> bool:
        """Whether it draws other random numbers for micro-batches than for a batch."""
        return not self.is_dropout and draws_random(self.layers)

    def run(self, values: dict[str, Any], training: bool, rows: Any = None, scope: Any = None) -> list[Any]:
        """Call it with the values that it takes; what it makes. See `Extras`."""
        return self.extras.call([values[name] for name in self.sources], training, rows, scope)


class Calls:
    """The calls of a model.

    Args:
        model: Functional or sequential, and built.
        carried: What its calls make besides values; None: not known yet.

    Raises:
        InvalidCall: It has what a pipeline cannot run.
    """

    def __init__(self, model: Any, carried: Carried | None = None) -> None:
        self._functional = functional_of(model)
        assert self._functional is not None
        refuse(self._functional)
        self.variables: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # of variables, by identity
        self.recorded = flattened(self._functional)
        self.carried = carried or Carried()
        self.flattened = self.recorded.carrying(self.carried.passed)
        self.states = States(self.flattened.steps)
        self.inputs = [f"input_{place}" for place in range(len(self._functional.inputs))]
        self.calls: list[Call] = []
        self.results = self._record()
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

    def outputs_of(self, outputs: list[Any]) -> tuple[Any, Any]:
        """The results, as the model returns them, and what layers add to the loss; see `packed`."""
        return packed(self._functional, outputs, self.flattened, self.carried)

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
                kind=type(call.step.operation).__name__,
                module=call.name,
                inputs=tuple(dict.fromkeys(call.sources)),
                outputs=tuple(call.outputs),
                parameters=tuple(call.variables),
                draws_mask=call.is_dropout,
            )

    def _record(self) -> list[str]:
        """Make the calls; the names of what the last stage needs of them."""
        found, carried = self.flattened, self.carried
        known = dict(zip(found.inputs, self.inputs, strict=True))
        masks: dict[int, str] = {}
        losses: list[str] = []
        for step in found.steps:
            name = self._name(step.operation)
            makes, adds = carried.makes(step), step.number in carried.losses
            count = len(step.outputs) + len(makes) + adds
            # Not as a layer can be called: Keras names them dense, dense_1 and so on.
            outputs = [name] if count == 1 else [f"{name}.{place}" for place in range(count)]
            names = [known[value] for value in step.sources.values()]
            names += [masks[mask] for mask in carried.takes(step).values()]
            variables = self._variables(step.operation, name)
            extras = Extras(step, carried)
            self.calls.append(Call(name, step, extras, names, outputs, variables, len(self.calls)))
            known |= zip(step.outputs, outputs, strict=False)
            masks |= zip([step.outputs[place] for place in makes], outputs[len(step.outputs) :], strict=False)
            losses += outputs[-1:] if adds else []
        results = [known[value] for value in found.results]
        return [*results, *(masks[mask] for mask in carried.of_results), *losses]

    def _name(self, operation: Any) -> str:
        name = re.sub(r"\W", "_", operation.name)
        known = {*self.inputs, *(call.name for call in self.calls)}
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
            lambda call: [maker[name] for name in call.sources if name in maker],
            [call for call in self.calls if call.step.is_mark],
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
