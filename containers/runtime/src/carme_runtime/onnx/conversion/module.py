"""ONNX models as PyTorch modules, to train them."""

import itertools
import re
from typing import Any

import torch

from carme_runtime.onnx.conversion import elementwise, layers, recurrent, shapes
from carme_runtime.onnx.conversion.table import CHECKS, OPERATORS, Node
from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Model, load
from carme_runtime.onnx.nodes import graphs, needed

__all__ = ["OnnxModule", "elementwise", "layers", "recurrent", "shapes", "to_torch"]

# Before it, Add, Mul and others name the axis at which they broadcast, and PRelu takes slopes by channel.
_LEAST_OPSET = 7
# Inputs of operators, by their places, that are settings or statistics and never trained.
_FIXED = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Dropout": (1, 2),
    "Pad": (1, 2, 3),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Range": (0, 1, 2),
    "Pow": (1,),
}


def to_torch(source: Any) -> "OnnxModule":
    """The model as a PyTorch module that computes the same, and can be trained.

    Floating point weights of more than one element are its parameters. BatchNormalization and Dropout do in
    `train()` what PyTorch's layers do there. All inputs are positional, in the model's order; the result is a
    tensor, or a tuple where the model has several outputs.

    Args:
        source: What `load` takes or gives.

    Raises:
        OnnxError: The model has operators that are not in the table, each is named with its node; a node asks
            for what its function does not do; or the opset is below 7.
    """
    model = source if isinstance(source, Model) else load(source)
    missing = [
        f"{node.name or node.output[0]} ({node.op_type})"
        for graph in graphs(model.proto.graph)
        for node in graph.node
        if (node.op_type not in OPERATORS and node.op_type != "If") or node.domain not in ("", "ai.onnx")
    ]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise OnnxError(
            f"{model.name} has nodes whose operators cannot be trained: {', '.join(missing[:8])}{more}.",
            "Run it with carme_runtime.onnx.run, or export it without them.",
        )
    if model.opset < _LEAST_OPSET:
        raise OnnxError(
            f"{model.name} is of opset {model.opset}, whose operators broadcast in another way.",
            f"Convert it with onnx.version_converter to opset {_LEAST_OPSET} or above.",
        )
    return OnnxModule(model)


class OnnxModule(torch.nn.Module):
    """A model; see `to_torch`.

    Attributes:
        names: The parameter or buffer of each initializer, by ONNX's name.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inputs = tuple(each.name for each in model.inputs)
        self.outputs = model.outputs
        self.names: dict[str, str] = {}
        self._model = model
        shape = model.inputs[0].shape if model.inputs else None
        # A batch that the model fixes: reshapes name it, and other batches have to be put there.
        self._batch = shape[0] if shape and isinstance(shape[0], int) else 0
        graph = model.proto.graph
        fixed = _fixed(graph)
        for tensor in graph.initializer:
            self._add(tensor.name, _tensor(tensor), tensor.name not in fixed)
        self._graph = _Graph(graph, model.opset)
        self._graph.constants.clear()  # they are parameters and buffers

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What moves or casts the module does so with constants that are not buffers, too."""
        self._graph.apply(fn)
        return super()._apply(fn, recurse)

    def _add(self, name: str, value: torch.Tensor, trained: bool) -> None:
        own = re.sub(r"\W", "_", name) or "value"
        if hasattr(self, own):
            own = next(f"{own}_{k}" for k in itertools.count(1) if not hasattr(self, f"{own}_{k}"))
        if trained and value.is_floating_point() and value.numel() > 1:
            self.register_parameter(own, torch.nn.Parameter(value))
        else:
            self.register_buffer(own, value)
        self.names[name] = own

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The model's outputs for its inputs, in their order."""
        if len(inputs) != len(self.inputs):
            raise OnnxError(
                f"The model takes {len(self.inputs)} inputs, and got {len(inputs)}.",
                f"Give {', '.join(self.inputs)}.",
            )
        values = {name: getattr(self, own) for name, own in self.names.items()}
        values.update(zip(self.inputs, inputs, strict=True))
        batch = (self._batch, inputs[0].shape[0] if self._batch else 0)
        results = self._graph.run(values, self.training, self.outputs, batch)
        return results[0] if len(results) == 1 else tuple(results)

    def leave_out(self, kind: str) -> None:
        """Give what the last operator gets instead of what it gives, where it is of this kind."""
        makers = {name: node for node in self._graph.nodes for name in node.outputs}
        last = makers.get(self.outputs[0])
        if len(self.outputs) == 1 and last is not None and last.kind == kind:
            self._graph.keep(last.inputs[0])
            self.outputs = (last.inputs[0],)

    def to_onnx(self) -> Any:
        """The `onnx.ModelProto` with the weights as they are now."""
        onnx = library("onnx")
        proto = onnx.ModelProto()
        proto.CopyFrom(self._model.proto)
        for tensor in proto.graph.initializer:
            value = getattr(self, self.names[tensor.name])
            if value.is_floating_point() and value.dtype != torch.bfloat16:
                tensor_proto = onnx.numpy_helper.from_array(value.detach().cpu().numpy(), tensor.name)
                tensor.CopyFrom(tensor_proto)
        return proto


class _Graph:
    """The nodes of a graph, ready to run."""

    def __init__(self, graph: Any, opset: int) -> None:
        self.nodes = [_node(each, opset) for each in graph.node]
        self.constants = {each.name: _tensor(each) for each in graph.initializer}
        self.outputs = tuple(each.name for each in graph.output)
        last: dict[str, int] = {}
        for place, each in enumerate(graph.node):
            last.update(dict.fromkeys(needed(each), place))
        outputs = {name for each in graph.node for name in each.output}
        self._ends: list[list[str]] = [[] for _ in self.nodes]
        for name, place in last.items():
            if name in outputs and name not in self.outputs:
                self._ends[place].append(name)

    def apply(self, function: Any) -> None:
        """Replace constants and tensors in attributes, of graphs within too, by what a function gives."""
        self.constants = {name: function(value) for name, value in self.constants.items()}
        for node in self.nodes:
            for name, value in node.attributes.items():
                if isinstance(value, torch.Tensor):
                    node.attributes[name] = function(value)
                elif isinstance(value, _Graph):
                    value.apply(function)

    def keep(self, name: str) -> None:
        """Do not forget a value after its last use."""
        self._ends = [[each for each in ended if each != name] for ended in self._ends]

    def run(
        self, values: dict[str, Any], training: bool, outputs: tuple[str, ...], batch: tuple[int, int]
    ) -> list[Any]:
        """Compute outputs from the values that are known; `batch`: the model's and the one that it got."""
        for node, ended in zip(self.nodes, self._ends, strict=True):
            inputs = [values[name] if name else None for name in node.inputs]
            node.training, node.batch = training, batch
            if node.kind == "If":
                branch = node.get("then_branch" if bool(inputs[0]) else "else_branch")
                results: Any = tuple(
                    branch.run({**values, **branch.constants}, training, branch.outputs, batch)
                )
            else:
                results = OPERATORS[node.kind](node, *inputs)
            results = results if isinstance(results, tuple) else (results,)
            values.update(zip(node.outputs, results, strict=False))
            for name in ended:
                del values[name]
        return [values[name] for name in outputs]


def _node(proto: Any, opset: int) -> Node:
    attributes = {each.name: _attribute(each, opset) for each in proto.attribute}
    converted = Node(proto.name, proto.op_type, attributes, tuple(proto.input), tuple(proto.output), opset)
    if proto.op_type in CHECKS:
        CHECKS[proto.op_type](converted)
    return converted


def _attribute(proto: Any, opset: int) -> Any:
    onnx = library("onnx")
    value = onnx.helper.get_attribute_value(proto)
    if isinstance(value, onnx.TensorProto):
        return _tensor(value)
    if isinstance(value, onnx.GraphProto):
        return _Graph(value, opset)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list | tuple) and value and isinstance(value[0], bytes):
        return [each.decode() for each in value]
    return list(value) if isinstance(value, list | tuple) else value


def _tensor(proto: Any) -> torch.Tensor:
    onnx = library("onnx")
    if proto.data_type == onnx.TensorProto.STRING:
        raise OnnxError(f"The constant {proto.name} is text.", "Models with text can run, but not train.")
    array = onnx.numpy_helper.to_array(proto)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype("float32")).to(torch.bfloat16)
    try:
        return torch.from_numpy(array.copy())
    except TypeError:
        raise OnnxError(
            f"The constant {proto.name} is of the type {array.dtype}, which PyTorch does not have.",
            "Such models can run, but not train.",
        ) from None


def _fixed(graph: Any) -> set[str]:
    """Initializers that are never trained: all uses say so, or one changes them in place."""
    found: set[str] = set()
    trained: set[str] = set()
    for each in graphs(graph):
        for node in each.node:
            settings = _FIXED.get(node.op_type, ())
            for place, name in enumerate(node.input):
                (found if place in settings else trained).add(name)
    changed = {
        name
        for each in graphs(graph)
        for node in each.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:5]
    }
    return found - trained | changed
