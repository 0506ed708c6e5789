"""A model's graph as the framework has it, with ours beside it."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from carme_runtime.graph import Graph, Value

_DROPOUT = torch.ops.aten.dropout.default


@dataclass
class Traced:
    """A model, the framework's graph of it, and ours.

    Args:
        model: As the user made it.
        root: Where `get_attr` and `call_module` nodes of `nodes` find what they name.
        nodes: In order: placeholders, operators, output.
        tensors: Names of parameters, by the placeholders that stand for them.
        constants: Tensors that are not a parameter or buffer of the model, by name.
        graph: Ours; operators have the names of their nodes.
        whole_layers: Names of layers that were not traced into, where the user named some.
        variable_shapes: Whether inputs may be smaller than the example, and not only in samples.
    """

    model: nn.Module
    root: nn.Module
    nodes: list[fx.Node]
    tensors: dict[str, str]
    constants: dict[str, torch.Tensor]
    graph: Graph
    whole_layers: Sequence[str] = ()
    variable_shapes: bool = False

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and constants of the model, by the graph's names."""
        return {**self.constants, **dict(self.model.named_buffers()), **dict(self.model.named_parameters())}


class SelfTraced(nn.Module):
    """A model that makes its graph itself."""

    def traced(self) -> Traced:
        """The graph, in training or evaluation as the model is. Raises InvalidCall."""
        raise NotImplementedError


def resized(tensors: Sequence[torch.Tensor], samples: int) -> tuple[torch.Tensor, ...]:
    """The same tensors with another number of samples: some of them, or all of them again."""
    return tuple(t[torch.arange(samples, device=t.device) % len(t)] for t in tensors)


def with_values(graph: Graph, values: dict[str, Value], **changes: Any) -> Graph:
    """The graph with its values described."""
    return dataclasses.replace(graph, values=tuple(values[v.name] for v in graph.values), **changes)


def is_dropout(node: fx.Node) -> bool:
    """Whether it is a Dropout layer that drops something, and so draws a mask."""
    return node.target is _DROPOUT and bool(node.args[2]) and float(node.args[1]) > 0  # pyright: ignore
