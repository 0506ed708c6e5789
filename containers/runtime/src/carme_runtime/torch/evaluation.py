"""What a traced model computes in evaluation: the same operators with other constants.

The model is traced a second time, in evaluation, and both traces are laid beside each other. So each stage
keeps its operators, and messages between stages stay what they are.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.pieces import counts_batches
from carme_runtime.torch.traced import Traced
from carme_runtime.torch.tracing import COMPUTED, capture

# By name of an operator in training: positional and named arguments in evaluation.
Constants = Mapping[str, tuple[Any, Any]]
_REMEDY = "Load state_dict() into a plain model to evaluate it."


def evaluated(
    traced: Traced, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], example: tuple[torch.Tensor, ...]
) -> Constants:
    """The arguments of the operators in evaluation.

    Args:
        traced: The model, in training; on this rank it may lack parameters of other stages.
        shapes: Of all its parameters and buffers, by name.
        example: What the model is called with.

    Raises:
        InvalidCall: The model has other operators in evaluation.
    """
    with _all_parameters(traced.model, shapes), _in_evaluation(traced.model):
        evaluation = capture(traced.model, example, traced.whole_layers, traced.variable_shapes)
    training = [n for n in traced.nodes if n.op in COMPUTED and not counts_batches(traced, n)]
    evaluating = [n for n in evaluation.nodes if n.op in COMPUTED]
    known = _sources(traced, evaluation)
    found: dict[str, tuple[Any, Any]] = {}
    for trained, node in zip(training, evaluating, strict=False):
        if trained.target != node.target or any(source not in known for source in node.all_input_nodes):
            raise _differs(trained)
        arguments = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        if [known[n] for n in node.all_input_nodes] != trained.all_input_nodes:
            raise _differs(trained)
        found[trained.name] = arguments
        known[node] = trained
    if len(training) != len(evaluating):
        raise _differs(max(training, evaluating, key=len)[min(len(training), len(evaluating))])
    if [known.get(n) for n in evaluation.nodes[-1].all_input_nodes] != traced.nodes[-1].all_input_nodes:
        raise _differs(traced.nodes[-1])
    return found


def _differs(node: fx.Node) -> InvalidCall:
    return InvalidCall(
        f"In evaluation the model does something else than in training (from {node.name} on), which a "
        "pipeline cannot run.",
        _REMEDY,
    )


def _sources(traced: Traced, evaluation: Traced) -> dict[fx.Node, fx.Node]:
    """The nodes that compute nothing, by those of the other trace."""
    by_label = {traced.tensors[n.name]: n for n in traced.nodes if n.name in traced.tensors}
    by_label |= {f"attribute {n.target}": n for n in traced.nodes if n.op == "get_attr"}
    by_label |= {f"input {i}": n for i, n in enumerate(_inputs(traced))}
    labels = {n: evaluation.tensors[n.name] for n in evaluation.nodes if n.name in evaluation.tensors}
    labels |= {n: f"attribute {n.target}" for n in evaluation.nodes if n.op == "get_attr"}
    labels |= {n: f"input {i}" for i, n in enumerate(_inputs(evaluation))}
    return {node: by_label[name] for node, name in labels.items() if name in by_label}


def _inputs(traced: Traced) -> list[fx.Node]:
    return [n for n in traced.nodes if n.op == "placeholder" and n.name not in traced.tensors]


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _all_parameters(model: nn.Module, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Iterator[None]:
    """Parameters of other stages have their shapes again, without memory."""
    absent = [
        (parameter, parameter.data)
        for name, parameter in model.named_parameters()
        if parameter.shape != shapes[name][0]
    ]
    try:
        for name, parameter in model.named_parameters():
            shape, dtype = shapes[name]
            if parameter.shape != shape:
                parameter.data = torch.zeros((), dtype=dtype, device=parameter.device).expand(shape)
        yield
    finally:
        for parameter, before in absent:
            parameter.data = before
