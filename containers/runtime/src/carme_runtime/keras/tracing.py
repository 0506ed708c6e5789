"""Keras models as graphs: each call of a layer is an operator, which a pipeline does not look into.

Only with Keras' torch backend, where layers are modules of PyTorch.
"""

# torch need not be installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import dataclasses
import operator
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.deferred import WholeBatch, can_defer
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
from carme_runtime.pipeline import rows
from carme_runtime.torch.traced import SelfTraced, Traced
from carme_runtime.torch.tracing import graph_of_nodes

_DROPOUT = torch.ops.aten.dropout.default


class LayerCall(nn.Module):
    """One call of a layer, or of another operation of Keras.

    Args:
        step: The call.
        named: The layer's variables, by names for their parameters.
        carried: What the model's calls make besides values.
        states: Of stateful layers.
    """

    def __init__(self, step: Step, named: dict[str, Any], carried: Carried, states: States) -> None:
        super().__init__()
        # in a tuple: a Keras layer is a module, whose parameters have other names
        self._of = (step, Extras(step, carried), carried, states)
        self._named = named
        self._measured = False
        self._whole_batch: WholeBatch | None = None
        for name, variable in named.items():
            self.register_parameter(name, variable.value)

    def __deepcopy__(self, memo: Any) -> "LayerCall":
        """What runs alike without changing the layer's state."""
        step, _, carried, states = self._of
        copied = LayerCall(step, self._named, carried, states)
        copied.training, copied._measured = self.training, True
        return copied

    @property
    def kind(self) -> str:
        """The name of the layer's class."""
        return type(self._of[0].operation).__name__

    @property
    def layers(self) -> list[Any]:
        """The layer, and those in it."""
        return self._of[0].layers

    @property
    def normalises_batches(self) -> bool:
        """Whether it looks at the whole batch in training."""
        return any(
            isinstance(layer, keras.layers.BatchNormalization) and layer.trainable for layer in self.layers
        )

    def defer_statistics(self) -> bool:
        """From now on moving averages wait for `update_statistics`. False: this layer cannot do that."""
        operation = self._of[0].operation
        if not can_defer(operation):
            return False
        self._whole_batch = WholeBatch(operation)
        return True

    def update_statistics(self) -> None:
        """The micro-batches of a step are over."""
        if self._whole_batch:
            self._whole_batch.update()

    @property
    def draws_random(self) -> bool:
        """Whether it draws random numbers of its own in training."""
        return draws_random(self.layers)

    def forward(self, *tensors: Any) -> Any:
        """Call the layer."""
        extras, states = self._of[1], self._of[3]
        own = None if self._measured else rows.current()
        numbers = states.rows(own.start, len(own)) if own is not None and extras.is_stateful else None
        if self._measured:
            with keras.StatelessScope(collect_losses=True) as scope:
                results = extras.call(tensors, self.training, numbers, scope)
        elif self._whole_batch and self.training:
            with self._whole_batch.noted() as scope:
                results = extras.call(tensors, self.training, numbers, scope)
        else:
            results = extras.call(tensors, self.training, numbers)
        return results[0] if len(results) == 1 else tuple(results)


class KerasGraph(SelfTraced):
    """A Keras model as a module of calls.

    Args:
        model: Functional or sequential, and built.
        carried: What its calls make besides values; None: not known yet.

    Raises:
        InvalidCall: It has what a pipeline cannot run.
    """

    def __init__(self, model: Any, carried: Carried | None = None) -> None:
        super().__init__()
        found = functional_of(model)
        assert found is not None
        self._of = (model, found)  # see LayerCall
        self._variable_of: dict[int, Any] = {}  # by the identity of its parameter
        self.cut_points: list[str] = []
        refuse(found)
        self.recorded = flattened(found)
        self.carried = carried or Carried()
        self.flattened = self.recorded.carrying(self.carried.passed)
        self.states = States(self.flattened.steps)
        self.graph = self._recorded()
        self.stages = self._split()

    @property
    def variables(self) -> dict[str, Any]:
        """The model's variables by the names of their parameters."""
        return {name: self._variable_of[id(p)] for name, p in self.named_parameters()}

    @property
    def symbols(self) -> Any:
        """Keras' symbols for the inputs."""
        return self._of[1].inputs

    def inputs_of(self, x: Any) -> tuple[torch.Tensor, ...]:
        """What `fit` and its like get, as the tensors that the graph takes."""
        flat = self._of[1]._standardize_inputs(x)
        if any(tensor is None for tensor in flat):
            raise InvalidCall("An input of the model is None.", "Give all inputs: pipelines need them.")
        return tuple(flat)

    def outputs_of(self, outputs: Any) -> tuple[Any, Any]:
        """What the graph returned, as the model returns it, and what layers add to the loss; see `packed`."""
        flat = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        return packed(self._of[1], flat, self.flattened, self.carried)

    def traced(self) -> Traced:
        """The graph, in training or evaluation as this module is."""
        graph = self.graph
        for node in graph.nodes:
            if node.target is _DROPOUT:
                node.args = (*node.args[:2], self.training)
        copied = fx.Graph()
        copied.output(copied.graph_copy(graph, {}))
        traced = graph_of_nodes(self, self, copied, {}, {}, "keras")
        operators = tuple(
            dataclasses.replace(described, kind=self._kind(described.module) or described.kind)
            for described in traced.graph.operators
        )
        traced.graph = dataclasses.replace(traced.graph, operators=operators)
        return traced

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run all of it."""
        return fx.Interpreter(self, graph=self.graph).run(*inputs)

    def _kind(self, name: str) -> str:
        call = dict(self.named_children()).get(name)
        return call.kind if isinstance(call, LayerCall) else ""

    # -- from Keras' records to a graph

    def _recorded(self) -> fx.Graph:
        graph, found = fx.Graph(), self.flattened
        known = {value: graph.placeholder(f"input_{i}") for i, value in enumerate(found.inputs)}
        masks: dict[int, fx.Node] = {}
        losses: list[fx.Node] = []
        for step in found.steps:
            self._call(graph, step, known, masks, losses)
        results = [known[value] for value in found.results]
        graph.output((*results, *(masks[mask] for mask in self.carried.of_results), *losses))
        return graph

    def _call(
        self,
        graph: fx.Graph,
        step: Step,
        known: dict[int, fx.Node],
        masks: dict[int, fx.Node],
        losses: list[fx.Node],
    ) -> None:
        operation, carried = step.operation, self.carried
        arguments = [known[value] for value in step.sources.values()]
        name = self._name(operation)
        makes, adds = carried.makes(step), step.number in carried.losses
        if is_plain_dropout(operation, step.node):
            call = graph.call_function(_DROPOUT, (arguments[0], float(operation.rate), True))
            # Dimension 0 counts samples; the others are known when it is measured.
            call.meta["val"] = SimpleNamespace(shape=(None, *(0,) * (len(step.node.outputs[0].shape) - 1)))
            call.meta["nn_module_stack"] = {name: (name, type(operation))}
            if operation.seed is not None:
                call.meta["draw"] = _Seeded(operation)
            self.add_module(name, nn.Identity())
        else:
            self.add_module(name, LayerCall(step, self._named_variables(operation), carried, self.states))
            arguments += [masks[mask] for mask in carried.takes(step).values()]
            call = graph.call_module(name, tuple(arguments))
        call.meta["split"] = step.is_mark
        count = len(step.outputs) + len(makes) + adds
        parts = [call]
        if count > 1:
            parts = [graph.call_function(operator.getitem, (call, place)) for place in range(count)]
        known |= zip(step.outputs, parts, strict=False)
        masks |= zip([step.outputs[place] for place in makes], parts[len(step.outputs) :], strict=False)
        losses += parts[-1:] if adds else []

    def _name(self, operation: Any) -> str:
        name = re.sub(r"\W", "_", operation.name)
        known = dict(self.named_children())
        numbers = (f"{name}_call{n}" for n in range(2, len(known) + 3))
        return name if name not in known else next(n for n in numbers if n not in known)

    def _named_variables(self, operation: Any) -> dict[str, Any]:
        variables = operation.variables if isinstance(operation, keras.Layer) else []
        named = {f"{place}_{re.sub(r'[^0-9A-Za-z_]', '_', v.name)}": v for place, v in enumerate(variables)}
        self._variable_of |= {id(v.value): v for v in variables}
        return named

    # -- SplitLayers

    def _split(self) -> int:
        """Let the operators of a stage follow each other; how many stages SplitLayers make."""
        nodes = [n for n in self.graph.nodes if n.op in ("call_module", "call_function")]
        marks = [node for node in nodes if node.meta.get("split")]
        stages = stages_by_marks(nodes, lambda node: node.all_input_nodes, marks, lambda node: node.name)
        self._arrange([node for stage in stages for node in stage])
        self.cut_points = [_module_of(stage[0]) for stage in stages[1:]]
        return len(stages)

    def _arrange(self, nodes: list[fx.Node]) -> None:
        for number, node in enumerate(n for n in self.graph.nodes if n.target is _DROPOUT):
            node.meta["order"] = number  # in which masks are drawn
        at = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        for node in nodes:
            at.append(node)
            at = node


def _module_of(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else next(iter(node.meta["nn_module_stack"]))


class _Seeded:
    """Draws the masks of a Dropout layer that has a seed, as that does itself."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, shape: list[int], keep: float, dtype: torch.dtype) -> torch.Tensor:
        generator = keras.src.backend.torch.random.torch_seed_generator(self._layer.seed_generator)
        return torch.bernoulli(torch.full(shape, keep), generator=generator).to(dtype)
