"""PyTorch models as graphs: by `torch.export`, or by layers where that cannot trace them."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import dataclasses
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph, Operator, Parameter, Value
from carme_runtime.logs import log
from carme_runtime.torch.measuring import measured
from carme_runtime.torch.traced import SelfTraced, Traced, is_dropout, resized
from carme_runtime.torch.views import viewed

COMPUTED = ("call_function", "call_method", "call_module")


def trace(
    model: nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor],
    *,
    whole_layers: Sequence[str] = (),
    samples: Sequence[int] = (),
    seconds: float = 10.0,
) -> Graph:
    """The graph of a model, with the costs of its operators as measured on this rank.

    The model is traced as it is, in training or evaluation. Neither its parameters and buffers nor the
    random numbers of the program change.

    Args:
        model: On one device.
        example: What the model is called with: a tensor, or several. Samples are counted by dimension 0.
        whole_layers: Names of layers that are taken as they are, where the model cannot be traced.
        samples: Numbers of samples with which to measure. Default: a quarter of the example's, and all.
        seconds: About how long to measure.

    Raises:
        InvalidCall: The example does not fit, or the model cannot be traced.
    """
    traced = capture(model, example_tensors(example), whole_layers)
    return measured(traced, example_tensors(example), samples, seconds)


def example_tensors(example: Any) -> tuple[torch.Tensor, ...]:
    """What the model is called with. Raises InvalidCall."""
    tensors = (example,) if isinstance(example, torch.Tensor) else example
    if not isinstance(tensors, list | tuple) or not tensors:
        raise InvalidCall("The example is not a tensor.", "Give what the model is called with: tensors.")
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() > 0 for tensor in tensors):
        raise InvalidCall(
            "The example holds something that is not a tensor with samples.",
            "Give what the model is called with: tensors whose dimension 0 counts the samples.",
        )
    counts = sorted({len(tensor) for tensor in tensors})
    if len(counts) > 1 or not counts[0]:
        raise InvalidCall(
            f"The tensors of the example have {counts} samples.",
            "Let dimension 0 of each count the same samples, at least one.",
        )
    return tuple(tensors)


def capture(
    model: nn.Module,
    example: tuple[torch.Tensor, ...],
    whole_layers: Sequence[str] = (),
    variable_shapes: bool = False,
) -> Traced:
    """Trace a model without measuring it; see `Traced`. Raises InvalidCall."""
    traced = _captured(model, example, whole_layers, variable_shapes)
    return dataclasses.replace(traced, variable_shapes=variable_shapes) if variable_shapes else traced


def _captured(
    model: nn.Module, example: tuple[torch.Tensor, ...], whole_layers: Sequence[str], variable_shapes: bool
) -> Traced:
    if isinstance(model, SelfTraced):
        return model.traced()
    unknown = [name for name in whole_layers if name not in dict(model.named_modules())]
    if unknown:
        known = ", ".join(name for name, _ in model.named_children())
        raise InvalidCall(f"The model has no layer '{unknown[0]}'.", f"Choose from its layers: {known}.")
    _check_call(model, example)
    if whole_layers:
        named = _by_layers(model, whole_layers, "You named layers to be taken as they are.")
        return dataclasses.replace(named, whole_layers=tuple(whole_layers))
    example = resized(example, max(len(example[0]), 2))  # one sample would count as a fixed size
    varying = [range(tensor.dim() if variable_shapes else 1) for tensor in example]
    sizes = tuple(dict.fromkeys(dimensions, torch.export.Dim.AUTO) for dimensions in varying)
    try:
        # A model whose forward takes *args has them as one argument.
        star = _takes_star(model)
        with warnings.catch_warnings():
            # An LSTM lists its weights anew when it is traced.
            warnings.filterwarnings("ignore", ".*assigned during export", UserWarning)
            program = torch.export.export(model, example, dynamic_shapes=(sizes,) if star else sizes)
    except Exception as error:
        return _by_layers(model, (), f"torch.export cannot trace the model ({_first_line(error)}).")
    return _exported(model, program)


def _takes_star(model: nn.Module) -> bool:
    import inspect

    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _check_call(model: nn.Module, example: tuple[torch.Tensor, ...]) -> None:
    import inspect

    try:
        inspect.signature(model.forward).bind(*example)
    except TypeError as error:
        raise InvalidCall(
            f"The model cannot be called with the {len(example)} tensors of the example ({error}).",
            "Give what the model is called with, without targets.",
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _exported(model: nn.Module, program: Any) -> Traced:
    signature = program.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    named |= signature.inputs_to_lifted_tensor_constants
    tensors = {name: _first_name(model, target) for name, target in named.items()}
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    constants = {
        name: program.constants[named[placeholder]]
        for placeholder, name in tensors.items()
        if name not in known
    }
    return graph_of_nodes(model, program.graph_module, program.graph, tensors, constants, "torch.export")


def _first_name(model: nn.Module, name: str) -> str:
    """Under which `named_parameters` or `named_buffers` has what is also called `name`."""
    for named in (model.named_parameters, model.named_buffers):
        tensor = dict(named(remove_duplicate=False)).get(name)
        if tensor is not None:
            return next(first for first, named_tensor in named() if named_tensor is tensor)
    return name


class _LayerTracer(fx.Tracer):
    """Sees how the model calls its layers, but not into them."""

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self._layers = layers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not self._layers:
            return not isinstance(m, nn.Sequential)
        return module_qualified_name in self._layers or super().is_leaf_module(m, module_qualified_name)


def _by_layers(model: nn.Module, layers: Sequence[str], reason: str) -> Traced:
    try:
        graph = _LayerTracer(layers).trace(model)
    except Exception as error:
        raise InvalidCall(
            f"{reason} Its own code cannot be traced by layers either ({_first_line(error)}).",
            "Put what depends on the data into layers, and name layers in `whole_layers`.",
        ) from None
    if not any(node.op == "call_module" for node in graph.nodes):
        raise InvalidCall(f"{reason} It has no layers between which it can be cut.", "Give it layers.")
    log.warning("%s It is cut between its layers only.", reason)
    return graph_of_nodes(model, model, graph, {}, {}, "modules")


def graph_of_nodes(
    model: nn.Module,
    root: nn.Module,
    graph: fx.Graph,
    tensors: dict[str, str],
    constants: dict[str, torch.Tensor],
    source: str,
) -> Traced:
    """Our graph of what a framework has recorded; see `Traced`. `source` says who did. Raises InvalidCall."""
    nodes = list(graph.nodes)
    inputs = [n.name for n in nodes if n.op == "placeholder" and n.name not in tensors]
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    traced = Traced(model, root, nodes, tensors, constants, None)  # pyright: ignore[reportArgumentType]
    known = traced.named_tensors()
    operators = [_operator(traced, node) for node in nodes if node.op in COMPUTED]
    used = {name for each in operators for name in each.parameters}
    parameters = [
        Parameter(name, tensor.numel() * tensor.element_size(), name in trainable)
        for name, tensor in known.items()
        if name in used
    ]
    values = [Value(name, (), "", 0, False, False) for name in inputs]
    values += [Value(name, (), "", 0, False, False) for each in operators for name in each.outputs]
    results = tuple(node.name for node in nodes[-1].all_input_nodes)
    outside = [n for n in results if n in tensors]
    if outside:
        raise InvalidCall(
            f"The model returns its parameter {tensors[outside[0]]} itself.", "Return computed values only."
        )
    traced.graph = Graph(
        source=source,
        device=_device(model),
        samples=0,
        inputs=tuple(inputs),
        results=results,
        values=tuple(values),
        operators=tuple(operators),
        parameters=tuple(parameters),
    )
    return traced


def _device(model: nn.Module) -> str:
    first = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(first) if first.type == "cuda" else str(first.type)


def _operator(traced: Traced, node: fx.Node) -> Operator:
    tensors, parameters, inputs = traced.tensors, [], []
    for source in node.all_input_nodes:
        if source.name in tensors:
            parameters.append(tensors[source.name])
        elif source.op == "get_attr":
            if isinstance(_attribute(traced.root, str(source.target)), torch.Tensor):
                parameters.append(_first_name(traced.model, str(source.target)))
        else:
            inputs.append(source.name)
    module = ""
    if node.op == "call_module":
        module = str(node.target)
        own = traced.model.get_submodule(module)
        for named in (own.named_parameters, own.named_buffers):
            parameters += [_first_name(traced.model, f"{module}.{name}") for name, _ in named()]
    elif stack := node.meta.get("nn_module_stack"):
        module = str(list(stack.values())[-1][0])
    module = "" if module.startswith("_empty_nn_module") else module
    kind = str(node.target) if node.op != "call_module" else type(traced.root.get_submodule(module)).__name__
    if node.target is operator.getitem:
        kind = "getitem"
    return Operator(
        name=node.name,
        kind=kind.removeprefix("aten."),
        module=module,
        inputs=tuple(inputs),
        outputs=(node.name,),
        parameters=tuple(dict.fromkeys(parameters)),
        beside=_beside(node, tensors),
        draws_mask=is_dropout(node),
    )


def _attribute(root: nn.Module, target: str) -> Any:
    found: Any = root
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _beside(node: fx.Node, tensors: dict[str, str]) -> str:
    """The operator on whose device this one must run. Raises InvalidCall where it would change an input."""
    if node.target is operator.getitem:
        return _producer_of(node.args[0], tensors)
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write or place >= len(node.args):
            continue
        changed = node.args[place]
        while isinstance(changed, fx.Node) and (source := viewed(changed)) is not None:
            changed = source
        if not isinstance(changed, fx.Node) or changed.name in tensors or changed.op == "get_attr":
            continue
        if changed.op == "placeholder":
            raise InvalidCall(
                f"The model changes its input {changed.name} in place ({node.name}).",
                "Let it change a copy: several stages may use the input.",
            )
        return changed.name
    return ""


def _producer_of(node: Any, tensors: dict[str, str]) -> str:
    computed = isinstance(node, fx.Node) and node.op in COMPUTED and node.name not in tensors
    return node.name if computed else ""
