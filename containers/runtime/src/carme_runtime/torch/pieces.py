"""Pieces of a traced model as functions of their own.

Each is a graph of the operators between two cuts. It is called with the parameters that it uses, what the
model is given, and values of other pieces; it returns what others need of it. What has to know of the whole
batch is replaced: Dropout takes masks that are drawn for the whole batch, and BatchNorm may leave its running
statistics to the end of the step. So is `view`, which depends on strides that messages do not keep.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from carme_runtime.pipeline import Pieces
from carme_runtime.torch.traced import Traced, is_dropout
from carme_runtime.torch.views import replaceable

_BATCH_NORM = torch.ops.aten.batch_norm.default
_LINEAR = torch.ops.aten.linear.default
_CONV = torch.ops.aten.conv2d.default
_RESHAPE = torch.ops.aten.reshape.default
# What draws random numbers, but is not seen to draw the same ones as a single process does.
_RANDOM = ("rand", "bernoulli", "dropout", "normal", "multinomial", "scaled_dot_product_attention", "rrelu")


@dataclass
class Piece:
    """One piece.

    Args:
        function: The graph.
        arguments: What it is called with: kind and name. Kinds are `parameter`, `input` (of the model),
            `value` (of another piece), `mask` and `helper`.
        results: Names of the values that it returns.
    """

    function: Callable[..., Any]
    arguments: list[tuple[str, str]]
    results: list[str]


@dataclass
class Later:
    """Gradients of weights that are made when there is time: calls, in the order in which they came up."""

    calls: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Statistics:
    """What BatchNorm layers saw of a batch so far: by layer its sums, and the number of values."""

    sums: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)

    def add(self, x: torch.Tensor, name: str) -> None:
        """Count a micro-batch's values."""
        x = x.detach()
        dims = [d for d in range(x.dim()) if d != 1]
        total, squares, count = self.sums.get(name, (torch.zeros(()), torch.zeros(()), 0.0))
        self.sums[name] = (
            total + x.sum(dims),
            squares + (x * x).sum(dims),
            count + x.numel() / x.shape[1],
        )


def piece_of(
    traced: Traced,
    pieces: Pieces,
    number: int,
    deferred: bool,
    split: bool,
    constants: Mapping[str, tuple[Any, Any]] | None = None,
) -> Piece:
    """Make a piece.

    Args:
        traced: The model.
        pieces: Its graph, cut.
        number: Which piece.
        deferred: Whether BatchNorm leaves its running statistics to the end of the step.
        split: Whether gradients of weights are made later.
        constants: The arguments of all operators in evaluation; None: in training. See `evaluation`.
    """
    return _Maker(traced, pieces, number, deferred, split, constants).piece()


class _Maker:
    def __init__(
        self,
        traced: Traced,
        pieces: Pieces,
        number: int,
        deferred: bool,
        split: bool,
        constants: Mapping[str, tuple[Any, Any]] | None,
    ) -> None:
        self._traced, self._pieces, self._number = traced, pieces, number
        self._deferred, self._split, self._constants = deferred, split, constants
        self._graph = fx.Graph()
        self._nodes = {node.name: node for node in traced.nodes}
        self._copies: dict[str, fx.Node] = {}
        self._placeholders: dict[tuple[str, str], fx.Node] = {}
        self._places = {operator.name: place for place, operator in enumerate(traced.graph.operators)}
        # What any piece can make itself, and what this one makes again.
        self._plain, self._views = traced.graph.plain, pieces.views(number)
        self._reshaped = replaceable(traced)
        self._body: list[Any] = []

    def piece(self) -> Piece:
        graph = self._traced.graph
        span = self._pieces.span(self._number)
        used = {v for place in span for v in graph.operators[place].inputs} | set(graph.results)
        for place in span:
            name = graph.operators[place].name
            if name not in self._plain or name in used:
                self._copy(self._nodes[name])
        channels = self._pieces.channels.items()
        results = [v for (source, _), values in channels if source == self._number for v in values]
        if self._number == self._pieces.count - 1:
            results += graph.results
        results = list(dict.fromkeys(results))
        self._graph.output(tuple(self._value(self._nodes[name]) for name in results))
        self._placeholders_first()
        function = fx.GraphModule(self._traced.root, self._graph)
        return Piece(function.forward, list(self._placeholders), results)

    def _placeholders_first(self) -> None:
        first = next((node for node in self._graph.nodes), None)
        for node in reversed(list(self._placeholders.values())):
            if node is not first and first is not None:
                first.prepend(node)
                first = node

    def _give(self, kind: str, name: str) -> fx.Node:
        key = (kind, name)
        if key not in self._placeholders:
            self._placeholders[key] = self._graph.placeholder(f"{kind}_{len(self._placeholders)}")
        return self._placeholders[key]

    def _value(self, node: fx.Node) -> fx.Node:
        """A node's value in this piece: computed, given, or sent by another piece."""
        if node.name in self._copies:
            return self._copies[node.name]
        if node.op == "placeholder":
            name = self._traced.tensors.get(node.name)
            return self._give("input", node.name) if name is None else self._give("parameter", name)
        piece = self._pieces.piece_of(self._places[node.name]) if node.name in self._places else self._number
        is_own = node.op == "get_attr" or piece == self._number
        if is_own or node.name in self._plain or node.name in self._views:
            return self._copy(node)
        return self._give("value", node.name)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.name in self._copies:
            return self._copies[node.name]
        # Arguments first: copies of plain numbers come up here.
        for source in node.all_input_nodes:
            self._value(source)
        copied = self._replaced(node)
        if copied is None:
            copied = self._graph.node_copy(node, self._value)
        if node.name in self._reshaped:
            copied.target = _RESHAPE
        self._copies[node.name] = copied
        return copied

    def _replaced(self, node: fx.Node) -> fx.Node | None:
        """Another node in the place of one that has to know of the whole batch, or comes later."""
        arguments = [self._value(a) if isinstance(a, fx.Node) else a for a in node.args]
        call = self._graph.call_function
        if self._constants is not None:
            if counts_batches(self._traced, node):
                return call(_no_operation, ())
            positional, named = fx.map_arg(self._constants[node.name], self._value)  # pyright: ignore
            return self._graph.create_node(node.op, node.target, positional, named)
        if is_dropout(node):
            mask = self._give("mask", node.name)
            return call(_with_mask, (arguments[0], mask))
        if self._deferred and node.target is _BATCH_NORM and node.args[5]:
            statistics = self._give("helper", "statistics")
            call(_count, (statistics, arguments[0], node.name))
            return call(_BATCH_NORM, (*arguments[:3], None, None, *arguments[5:]))
        if self._deferred and counts_batches(self._traced, node):
            return call(_no_operation, ())
        if self._split and node.target is _LINEAR and self._is_weight(node.args[1]):
            return call(_linear_later, (self._give("helper", "later"), *arguments))
        if self._split and node.target is _CONV and self._is_weight(node.args[1]):
            return call(_conv_later, (self._give("helper", "later"), *arguments))
        return None

    def _is_weight(self, argument: Any) -> bool:
        name = self._traced.tensors.get(getattr(argument, "name", ""), "")
        known = self._traced.graph.parameter.get(name)
        return known is not None and known.trainable


def counts_batches(traced: Traced, node: fx.Node) -> bool:
    """Whether it counts the batches that a BatchNorm layer has seen."""
    first = node.args[0] if node.args else None
    name = traced.tensors.get(getattr(first, "name", ""), "")
    return node.target is torch.ops.aten.add_.Tensor and name.endswith("num_batches_tracked")


def batch_norms(traced: Traced) -> list[fx.Node]:
    """The layers that normalise over the batch, where the model was traced into them."""
    return [n for n in traced.nodes if n.target is _BATCH_NORM and n.args[5]]


def opaque_batch_norms(traced: Traced) -> list[nn.Module]:
    """Such layers within what was not traced."""
    modules = [traced.root.get_submodule(str(n.target)) for n in traced.nodes if n.op == "call_module"]
    return [
        inner
        for module in modules
        for inner in module.modules()
        if inner.training
        and (
            isinstance(inner, nn.modules.batchnorm._BatchNorm) or getattr(inner, "normalises_batches", False)
        )
    ]


def defer_statistics(module: nn.Module) -> bool:
    """Let a layer that was not traced into defer its running statistics; whether it can."""
    return bool(getattr(module, "defer_statistics", lambda: False)())


def other_random(traced: Traced) -> str:
    """An operator that draws random numbers of its own; empty where there is none."""
    for node in traced.nodes:
        if node.op == "call_module":
            inner = traced.root.get_submodule(str(node.target))
            if any(m.training and _draws_random(m) for m in inner.modules()):
                return node.name
        name = str(node.target).removeprefix("aten.").split(".")[0]
        if node.op == "call_function" and name.startswith(_RANDOM) and not is_dropout(node):
            attention = name.startswith("scaled_dot_product")
            dropped = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
            quiet = name == "dropout" or (attention and not dropped)
            if not quiet:
                return node.name
    return ""


def _draws_random(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p)
    return bool(getattr(module, "draws_random", False))


def update_running_statistics(traced: Traced, statistics: Statistics, own: set[str]) -> None:
    """What BatchNorm layers do at the end of a batch, once for all its micro-batches.

    Args:
        traced: The model.
        statistics: Of the layers of this rank.
        own: Names of the operators that this rank runs.
    """
    known = traced.named_tensors()
    for node in batch_norms(traced):
        if node.name not in statistics.sums:
            continue
        total, squares, count = statistics.sums[node.name]
        mean, variance = total / count, squares / count - (total / count) ** 2
        momentum: Any = node.args[6]
        names = [traced.tensors.get(getattr(node.args[i], "name", ""), "") for i in (3, 4)]
        unbiased = variance * count / max(count - 1, 1)
        for name, new in zip(names, (mean, unbiased), strict=True):
            if name:
                known[name].lerp_(new.to(known[name].dtype), momentum)
    for node in traced.nodes:
        if node.name in own and counts_batches(traced, node):
            known[traced.tensors[node.args[0].name]].add_(1)  # pyright: ignore
        if node.name in own and node.op == "call_module":
            update: Any = getattr(
                traced.root.get_submodule(str(node.target)), "update_statistics", _no_operation
            )
            update()


def _with_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * mask


def _count(statistics: Statistics, x: torch.Tensor, name: str) -> None:
    statistics.add(x, name)


def _no_operation() -> None:
    return None


class _LinearLater(torch.autograd.Function):
    """A linear layer whose weights' gradients are made later."""

    @staticmethod
    def forward(ctx: Any, later: Later, x: Any, weight: Any, bias: Any) -> torch.Tensor:
        ctx.later, ctx.bias = later, bias
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        bias, trains = ctx.bias, ctx.needs_input_grad[2]

        def weights() -> None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            if trains:  # it may have been frozen since the pipeline was made
                _add(weight, rows.t() @ x.reshape(-1, x.shape[-1]))
            if bias is not None and bias.requires_grad:
                _add(bias, rows.sum(0))

        ctx.later.calls.append(weights)
        return None, gradient @ weight if ctx.needs_input_grad[1] else None, None, None


class _ConvLater(torch.autograd.Function):
    """The same for a convolution."""

    @staticmethod
    def forward(ctx: Any, later: Later, x: Any, weight: Any, bias: Any, options: Any) -> torch.Tensor:
        ctx.later, ctx.bias, ctx.options = later, bias, options
        ctx.save_for_backward(x, weight)
        return torch.conv2d(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        bias, trains = ctx.bias, ctx.needs_input_grad[2]
        stride, padding, dilation, groups = ctx.options

        def passed(mask: list[bool]) -> Any:
            sizes = [weight.shape[0]] if bias is not None else None
            return torch.ops.aten.convolution_backward(
                gradient, x, weight, sizes, stride, padding, dilation, False, [0, 0], groups, mask
            )

        def weights() -> None:
            with_bias = bias is not None and bias.requires_grad
            _, of_weight, of_bias = passed([False, trains, with_bias])
            if trains:
                _add(weight, of_weight)
            if bias is not None and with_bias:
                _add(bias, of_bias)

        ctx.later.calls.append(weights)
        of_input = passed([True, False, False])[0] if ctx.needs_input_grad[1] else None
        return None, of_input, None, None, None


def _linear_later(later: Later, x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):  # which knows how to cast both ways
        return nn.functional.linear(x, weight, bias)
    return _LinearLater.apply(later, x, weight, bias)  # pyright: ignore


def _conv_later(
    later: Later,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)

    def pair(each: Any) -> list[int]:
        numbers = [each] if isinstance(each, int) else list(each)
        return numbers * 2 if len(numbers) == 1 else numbers

    options = (*map(pair, (stride, padding, dilation)), groups)
    return _ConvLater.apply(later, x, weight, bias, options)  # pyright: ignore


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
