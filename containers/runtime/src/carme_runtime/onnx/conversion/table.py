"""The table of operators: by ONNX's name, what computes the same with PyTorch.

A function gets the node and its inputs as tensors (None where an optional one is left out), and returns a
tensor, or a tuple where the operator has several outputs. Semantics: https://onnx.ai/onnx/operators/
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from carme_runtime.onnx.errors import OnnxError

Function = Callable[..., Any]
OPERATORS: dict[str, Function] = {}
#: What refuses nodes, by attributes that cannot be computed, before anything runs.
CHECKS: dict[str, Callable[["Node"], None]] = {}


@dataclass
class Node:
    """A node of the graph.

    Args:
        name: Of the node.
        kind: ONNX's name of the operator.
        attributes: As Python values; tensors are tensors, graphs are compiled.
        inputs: Names of values; empty where an optional one is left out.
        outputs: The same.
        opset: Of the model.
        training: Whether it runs to be trained.
        batch: The first dimension that the model says it has, and the one that it got; 0: it says none.
    """

    name: str
    kind: str
    attributes: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    training: bool = False
    batch: tuple[int, int] = (0, 0)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)


def operator(*names: str) -> Callable[[Function], Function]:
    """Put a function into the table."""

    def register(function: Function) -> Function:
        for name in names:
            OPERATORS[name] = function
        return function

    return register


def checks(*names: str) -> Callable[[Callable[[Node], None]], Callable[[Node], None]]:
    """Let a function look at nodes of these operators when a model is converted; it raises OnnxError."""

    def register(function: Callable[[Node], None]) -> Callable[[Node], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def refuse_others(node: Node, attribute: str, known: Collection[str], usual: str) -> None:
    """Raise OnnxError where an attribute is none of those that are known; `usual`: what it is by default."""
    value = node.get(attribute, usual)
    if value not in known:
        raise OnnxError(
            f"Node {node.name} is a {node.kind} with {attribute} {value}, which cannot be trained.",
            f"Export the model with one of {', '.join(sorted(known))}.",
        )


def integers(value: Any) -> list[int]:
    """A tensor or list of numbers as Python's, which shapes and axes have to be."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return [int(each) for each in (value if isinstance(value, list | tuple) else [value])]


def axes_of(node: Node, axes_input: Any) -> list[int] | None:
    """Axes, an attribute of older opsets and an input of newer ones; None: there are none."""
    if axes_input is not None and axes_input.numel():
        return integers(axes_input)
    axes = node.get("axes")
    return integers(axes) if axes is not None else None
