"""Operators that compute each element by itself, comparisons, and reductions."""

import functools
from typing import Any

import torch
from torch.nn import functional

from carme_runtime.onnx.conversion.table import OPERATORS, Node, axes_of, checks, operator
from carme_runtime.onnx.errors import OnnxError

# ONNX's numbers of types: onnx.TensorProto.DataType.
TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}

_UNARY = {
    "Abs": torch.abs, "Acos": torch.acos, "Asin": torch.asin, "Atan": torch.atan, "Ceil": torch.ceil,
    "Cos": torch.cos, "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "Identity": lambda x: x, "IsNaN": torch.isnan, "Log": torch.log, "Neg": torch.neg,
    "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh,
    "Softplus": functional.softplus, "Softsign": functional.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh, "Mish": functional.mish, "HardSwish": functional.hardswish,
}  # fmt: skip
_BINARY = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt,
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le,
}  # fmt: skip
_FOLDED = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}
_REDUCTIONS = {
    "ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceL1": lambda x, dim, keepdim: x.abs().sum(dim, keepdim),
    "ReduceL2": lambda x, dim, keepdim: x.square().sum(dim, keepdim).sqrt(),
    "ReduceSumSquare": lambda x, dim, keepdim: x.square().sum(dim, keepdim),
}  # fmt: skip


def _unary(function: Any) -> Any:
    return lambda node, x: function(x)


def _binary(function: Any) -> Any:
    return lambda node, x, y: function(x, y)


def _folded(function: Any) -> Any:
    return lambda node, *values: functools.reduce(function, values)


def _reduction(function: Any) -> Any:
    def reduce(node: Node, x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
        chosen = axes_of(node, axes)
        if chosen is None:
            if node.get("noop_with_empty_axes", 0):
                return x
            chosen = list(range(x.ndim))
        return function(x, tuple(chosen), bool(node.get("keepdims", 1))) if x.ndim else x

    return reduce


OPERATORS.update({name: _unary(function) for name, function in _UNARY.items()})
OPERATORS.update({name: _binary(function) for name, function in _BINARY.items()})
OPERATORS.update({name: _folded(function) for name, function in _FOLDED.items()})
OPERATORS.update({name: _reduction(function) for name, function in _REDUCTIONS.items()})


@operator("Mean")
def mean(node: Node, *values: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, values) / len(values)


@operator("Div")
def divide(node: Node, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = not (x.is_floating_point() or y.is_floating_point())
    return torch.div(x, y, rounding_mode="trunc" if whole else None)


@operator("Mod")
def modulo(node: Node, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


@operator("Pow")
def power(node: Node, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.pow(x, y).to(x.dtype)


@operator("Where")
def where(node: Node, condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, x, y)


@operator("IsInf")
def is_infinite(node: Node, x: torch.Tensor) -> torch.Tensor:
    none = torch.zeros_like(x, dtype=torch.bool)
    above = torch.isposinf(x) if node.get("detect_positive", 1) else none
    return above | (torch.isneginf(x) if node.get("detect_negative", 1) else none)


@checks("Cast")
def check_cast(node: Node) -> None:
    if node.get("to") not in TYPES:
        raise OnnxError(
            f"Node {node.name} casts to ONNX's type {node.get('to')}, which cannot be trained.",
            "Run the model with carme_runtime.onnx.run, or export it without this type.",
        )


@operator("Cast")
def cast(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x.to(TYPES[node.get("to")])


@operator("CastLike")
def cast_like(node: Node, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.to(y.dtype)


@operator("Clip")
def clip(node: Node, x: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
    low = node.get("min") if low is None else low
    high = node.get("max") if high is None else high
    if low is not None:
        x = torch.maximum(x, torch.as_tensor(low, dtype=x.dtype, device=x.device))
    return x if high is None else torch.minimum(x, torch.as_tensor(high, dtype=x.dtype, device=x.device))


@operator("LeakyRelu")
def leaky_relu(node: Node, x: torch.Tensor) -> torch.Tensor:
    return functional.leaky_relu(x, node.get("alpha", 0.01))


@operator("PRelu")
def prelu(node: Node, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 0, x * slope, x)


@operator("Elu")
def elu(node: Node, x: torch.Tensor) -> torch.Tensor:
    return functional.elu(x, node.get("alpha", 1.0))


@operator("Selu")
def selu(node: Node, x: torch.Tensor) -> torch.Tensor:
    alpha, gamma = node.get("alpha", 1.6732632), node.get("gamma", 1.0507010)
    return gamma * torch.where(x > 0, x, alpha * (torch.exp(x) - 1))


@operator("Gelu")
def gelu(node: Node, x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate=node.get("approximate", "none"))


@operator("HardSigmoid")
def hard_sigmoid(node: Node, x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(node.get("alpha", 0.2) * x + node.get("beta", 0.5), 0, 1)


@operator("ArgMax", "ArgMin")
def arg(node: Node, x: torch.Tensor) -> torch.Tensor:
    axis, last = node.get("axis", 0), bool(node.get("select_last_index", 0))
    find = torch.argmax if node.kind == "ArgMax" else torch.argmin
    keep = bool(node.get("keepdims", 1))
    if last:
        return x.shape[axis] - 1 - find(x.flip(axis), axis, keepdim=keep)
    return find(x, axis, keepdim=keep)


@operator("CumSum")
def cumulative_sum(node: Node, x: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
    dim = int(axis)
    if node.get("reverse", 0):
        x = x.flip(dim)
    sums = torch.cumsum(x, dim) - (x if node.get("exclusive", 0) else 0)
    return sums.flip(dim) if node.get("reverse", 0) else sums
