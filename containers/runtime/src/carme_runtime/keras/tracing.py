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
from carme_runtime.torch.traced import SelfTraced, Traced
from carme_runtime.torch.tracing import graph_of_nodes

_DROPOUT = torch.ops.aten.dropout.default


class LayerCall(nn.Module):
    """One call of a layer, or of another operation of Keras.

    Args:
        operation: What is called.
        node: Keras' record of the call.
        named: The layer's variables, by names for their parameters.
    """

    def __init__(self, operation: Any, node: Any, named: dict[str, Any]) -> None:
        super().__init__()
        self._of = (
            operation,
            node,
        )  # in a tuple: a Keras layer is a module, whose parameters have other names
        self._named = named
        self._measured = False
        self._whole_batch: WholeBatch | None = None
        self.places = list(dict.fromkeys(id(t) for t in node.arguments.keras_tensors))
        for name, variable in named.items():
            self.register_parameter(name, variable.value)

    def __deepcopy__(self, memo: Any) -> "LayerCall":
        """What runs alike without changing the layer's state."""
        operation, node = self._of
        copied = LayerCall(operation, node, self._named)
        copied.training, copied._measured = self.training, True
        return copied

    @property
    def kind(self) -> str:
        """The name of the layer's class."""
        return type(self._of[0]).__name__

    @property
    def layers(self) -> list[Any]:
        """The layer, and those in it."""
        operation = self._of[0]
        return list(operation._flatten_layers()) if isinstance(operation, keras.Layer) else []

    @property
    def normalises_batches(self) -> bool:
        """Whether it looks at the whole batch in training."""
        return any(isinstance(one, keras.layers.BatchNormalization) and one.trainable for one in self.layers)

    def defer_statistics(self) -> bool:
        """From now on moving averages wait for `update_statistics`. False: this layer cannot do that."""
        operation = self._of[0]
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
        operation, node = self._of
        arguments, keywords = node.arguments.fill_in(dict(zip(self.places, tensors, strict=True)))
        call = functional.operation_fn(operation, training=self.training)
        if self._measured:
            with keras.StatelessScope():
                result = call(*arguments, **keywords)
        elif self._whole_batch and self.training:
            with self._whole_batch.noted():
                result = call(*arguments, **keywords)
        else:
            result = call(*arguments, **keywords)
        flat = keras.tree.flatten(result)
        return flat[0] if len(node.outputs) == 1 else tuple(flat)


class KerasGraph(SelfTraced):
    """A Keras model as a module of calls.

    Args:
        model: Functional or sequential, and built.

    Raises:
        InvalidCall: It has what a pipeline cannot run.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        found = functional_of(model)
        assert found is not None
        self._of = (model, found)  # see LayerCall
        self._variable_of: dict[int, Any] = {}  # by the identity of its parameter
        self.cut_points: list[str] = []
        refuse(found)
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

    def outputs_of(self, outputs: Any) -> Any:
        """What the graph returned, as the model returns it."""
        flat = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        return functional.unpack_singleton(keras.tree.pack_sequence_as(self._of[1]._outputs_struct, flat))

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
            dataclasses.replace(one, kind=self._kind(one.module) or one.kind)
            for one in traced.graph.operators
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
        graph = fx.Graph()
        inputs = [graph.placeholder(f"input_{i}") for i in range(len(self._of[1].inputs))]
        outputs = self._run(graph, self._of[1], inputs)
        if len({node.name for node in outputs}) < len(outputs) or set(outputs) & set(inputs):
            raise InvalidCall(
                "The model returns an input, or one value twice, which a pipeline cannot.",
                "Return each computed value once.",
            )
        graph.output(tuple(outputs))
        return graph

    def _run(self, graph: fx.Graph, functional: Any, inputs: list[fx.Node]) -> list[fx.Node]:
        known = dict(zip(map(id, functional.inputs), inputs, strict=True))
        by_depth = functional._nodes_by_depth
        for depth in sorted(by_depth, reverse=True):  # as Keras itself runs them
            for node in by_depth[depth]:
                if node.is_input or any(id(t) not in known for t in node.arguments.keras_tensors):
                    continue
                known |= zip(map(id, node.outputs), self._call(graph, node, known), strict=True)
        return [known[id(t)] for t in functional.outputs]

    def _call(self, graph: fx.Graph, node: Any, known: dict[int, fx.Node]) -> list[fx.Node]:
        operation = node.operation
        inner = functional_of(operation) if isinstance(operation, keras.Model) else None
        tensors = list(dict.fromkeys(id(t) for t in node.arguments.keras_tensors))
        if inner is not None and len(tensors) == len(inner.inputs):
            return self._run(graph, inner, [known[t] for t in tensors])
        name = self._name(operation)
        if is_plain_dropout(operation, node):
            made = graph.call_function(_DROPOUT, (known[tensors[0]], float(operation.rate), True))
            # Dimension 0 counts samples; the others are known when it is measured.
            made.meta["val"] = SimpleNamespace(shape=(None, *(0,) * (len(node.outputs[0].shape) - 1)))
            made.meta["nn_module_stack"] = {name: (name, type(operation))}
            if operation.seed is not None:
                made.meta["draw"] = _Seeded(operation)
            self.add_module(name, nn.Identity())
        else:
            self.add_module(name, LayerCall(operation, node, self._named_variables(operation)))
            made = graph.call_module(name, tuple(known[t] for t in tensors))
        made.meta["split"] = is_mark(operation, node)
        if len(node.outputs) == 1:
            return [made]
        return [graph.call_function(operator.getitem, (made, place)) for place in range(len(node.outputs))]

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
