"""The networks as blocks of MXNet's Gluon."""

# MXNet is optional.
# pyright: reportMissingImports=false

import math
from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from carme_runtime.compare.layers import EPSILON, Layer, channels_first, channels_last
from carme_runtime.compare.tasks import Task


def build(task: Task) -> Any:
    """The network with the task's weights."""
    is_image = len(task.network.shape) == 3
    model = _sequence(task.network.layers, is_image)
    model.initialize()
    # Shapes of weights are known after the first samples.
    model(mx.nd.array(prepare_inputs(task.inputs[:1, :1])[0]))
    for layer, block in _weighted(task.network.layers, model):
        _load(layer, block, task.weights)
    return model


def first_gradients(task: Task, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """By what the first step has made of the task's weights, so they are as exact as these are rounded."""
    for layer, block in _weighted(task.network.layers, model):
        if layer.kind.endswith("_norm"):
            names, parameters = ("scale", "bias"), (block.gamma, block.beta)
        else:
            names, parameters = ("kernel", "bias"), (block.weight, block.bias)
        for name, parameter in zip(names, parameters, strict=True):
            value = parameter.data().asnumpy()
            if name == "kernel":
                dense = layer.kind == "dense"
                value = channels_last(layer, value.T) if dense else value.transpose(2, 3, 1, 0)
            before = task.weights[f"{layer.name}.{name}"]
            yield f"{layer.name}.{name}", (before - value) / task.network.rate


def prepare_inputs(inputs: np.ndarray) -> np.ndarray:
    """Batches of images with their channels first, others as they are."""
    return np.ascontiguousarray(np.moveaxis(inputs, -1, 2)) if inputs.ndim == 5 else inputs


class _Mean(nn.HybridBlock):
    def hybrid_forward(self, F: Any, values: Any) -> Any:
        """Over pieces."""
        return F.mean(values, axis=1)


class _ImageMean(nn.HybridBlock):
    def hybrid_forward(self, F: Any, values: Any) -> Any:
        """Over pixels; a compiled block does not know how many dimensions its input has."""
        return F.mean(values, axis=(2, 3))


class _Branches(nn.HybridBlock):
    def __init__(self, layer: Layer, is_image: bool) -> None:
        super().__init__()
        self.kind = layer.kind
        with self.name_scope():
            self.branches = [_sequence(branch, is_image) for branch in layer.branches]
        for branch in self.branches:
            self.register_child(branch)

    def hybrid_forward(self, F: Any, values: Any) -> Any:
        """Their results, joined by channels or added."""
        parts = [branch(values) for branch in self.branches]
        return F.concat(*parts, dim=1) if self.kind == "concat" else sum(parts[1:], parts[0])


class _Larger(nn.HybridBlock):
    def hybrid_forward(self, F: Any, values: Any) -> Any:
        """Each pixel becomes 2x2."""
        return F.UpSampling(values, scale=2, sample_type="nearest")


class _Pixels(nn.HybridBlock):
    def hybrid_forward(self, F: Any, values: Any) -> Any:
        """The classes last."""
        return F.transpose(values, axes=(0, 2, 3, 1))


class _Attention(nn.HybridBlock):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(width / heads)
        with self.name_scope():
            self.q, self.k, self.v, self.o = (nn.Dense(width, flatten=False) for _ in range(4))

    def hybrid_forward(self, F: Any, values: Any) -> Any:
        """Of each piece to all."""

        def split(part: Any) -> Any:  # (samples, length, width) -> (samples * heads, length, width / heads)
            parts = F.reshape(part, shape=(0, 0, self.heads, -1))
            return F.reshape(F.transpose(parts, axes=(0, 2, 1, 3)), shape=(-3, 0, 0))

        q, k, v = (split(dense(values)) for dense in (self.q, self.k, self.v))
        scores = F.softmax(F.batch_dot(q, k, transpose_b=True) * self.scale)
        mixed = F.reshape(F.batch_dot(scores, v), shape=(-4, -1, self.heads, 0, 0))
        return self.o(F.reshape(F.transpose(mixed, axes=(0, 2, 1, 3)), shape=(0, 0, -3)))


def _sequence(layers: tuple[Layer, ...], is_image: bool) -> Any:
    sequence = nn.HybridSequential()
    with sequence.name_scope():
        sequence.add(*(_block(layer, is_image) for layer in layers))
    return sequence


def _block(layer: Layer, is_image: bool) -> Any:
    builders: dict[str, Any] = {
        "dense": lambda: nn.Dense(layer.outputs, flatten=False),
        "conv": lambda: nn.Conv2D(layer.outputs, layer.size, layer.stride, layer.padding),
        "relu": lambda: nn.Activation("relu"),
        "pool": lambda: nn.MaxPool2D(layer.size, layer.stride, layer.padding),
        "up": _Larger,
        "pixels": _Pixels,
        "flatten": nn.Flatten,
        "mean": _ImageMean if is_image else _Mean,
        "batch_norm": lambda: nn.BatchNorm(epsilon=EPSILON),
        "layer_norm": lambda: nn.LayerNorm(epsilon=EPSILON),
        "attention": lambda: _Attention(layer.outputs, layer.heads),
        "sum": lambda: _Branches(layer, is_image),
        "concat": lambda: _Branches(layer, is_image),
    }
    return builders[layer.kind]()


def _weighted(layers: tuple[Layer, ...], blocks: Any) -> Iterator[tuple[Layer, Any]]:
    """The layers that have weights of their own, each with its block."""
    for number, layer in enumerate(layers):
        block = blocks[number]
        if layer.branches:
            for branch, blocks_of_branch in zip(layer.branches, block.branches, strict=True):
                yield from _weighted(branch, blocks_of_branch)
        elif layer.kind == "attention":
            for part in "qkvo":
                yield Layer("dense", f"{layer.name}.{part}"), getattr(block, part)
        elif layer.shapes():
            yield layer, block


def _load(layer: Layer, block: Any, weights: dict[str, np.ndarray]) -> None:
    if layer.kind.endswith("_norm"):
        block.gamma.set_data(mx.nd.array(weights[f"{layer.name}.scale"]))
        block.beta.set_data(mx.nd.array(weights[f"{layer.name}.bias"]))
        return
    kernel = channels_first(layer, weights[f"{layer.name}.kernel"])
    turned = kernel.T if layer.kind == "dense" else kernel.transpose(3, 2, 0, 1)
    block.weight.set_data(mx.nd.array(turned))
    block.bias.set_data(mx.nd.array(weights[f"{layer.name}.bias"]))
