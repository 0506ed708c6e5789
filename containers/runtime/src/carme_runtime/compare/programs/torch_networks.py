"""The networks as modules of PyTorch."""

# PyTorch is optional.
# pyright: reportMissingImports=false

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from carme_runtime.compare.layers import EPSILON, Layer, channels_first, channels_last
from carme_runtime.compare.programs import Work
from carme_runtime.compare.tasks import Task


def build(task: Task) -> nn.Module:
    """The network with the task's weights."""
    model = _sequence(task.network.layers)
    with torch.no_grad():
        for layer, module in _weighted(task.network.layers, model):
            _load(layer, module, task.weights)
    return model


def first_gradients(task: Task, model: nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Those that the parameters have, by the names and in the shapes of the task's weights."""
    for layer, module in _weighted(task.network.layers, model):
        weight, bias = (parameter.grad.float().numpy() for parameter in (module.weight, module.bias))
        if layer.kind == "conv":
            weight = weight.transpose(2, 3, 1, 0)
        elif layer.kind == "dense":
            weight = channels_last(layer, weight.T)
        yield f"{layer.name}.{'scale' if layer.kind.endswith('_norm') else 'kernel'}", weight
        yield f"{layer.name}.bias", bias


def prepare_inputs(inputs: np.ndarray) -> np.ndarray:
    """Batches of images with their channels first, others as they are."""
    return np.ascontiguousarray(np.moveaxis(inputs, -1, 2)) if inputs.ndim == 5 else inputs


def set_threads(threads: int) -> None:
    """Those that each operation may use; operations do not run beside each other."""
    torch.set_num_threads(threads)


def precision_of(work: Work) -> contextlib.AbstractContextManager[Any]:
    """The context that computes in bf16 where that is requested; it may be entered again and again."""
    return torch.autocast("cpu", torch.bfloat16) if work.is_bf16 else contextlib.nullcontext()


class _Mean(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Over pixels, or over pieces."""
        return values.mean((2, 3)) if values.ndim == 4 else values.mean(1)


class _Branches(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.kind = layer.kind
        self.branches = nn.ModuleList(map(_sequence, layer.branches))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Their results, joined by channels or added."""
        parts = [branch(values) for branch in self.branches]
        if self.kind == "concat":
            return torch.cat(parts, 1)
        total: Any = sum(parts[1:], parts[0])  # typed as if it could be empty
        return total


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(values).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _sequence(layers: tuple[Layer, ...]) -> nn.Sequential:
    return nn.Sequential(*map(_module, layers))


def _module(layer: Layer) -> nn.Module:
    builders: dict[str, Any] = {
        "dense": lambda: nn.Linear(layer.inputs, layer.outputs),
        "conv": lambda: nn.Conv2d(layer.inputs, layer.outputs, layer.size, layer.stride, layer.padding),
        "relu": nn.ReLU,
        "pool": lambda: nn.MaxPool2d(layer.size, layer.stride, layer.padding),
        "up": lambda: nn.Upsample(scale_factor=2),
        "pixels": nn.Identity,  # functions of loss take images with their classes first, too
        "flatten": nn.Flatten,
        "mean": _Mean,
        "batch_norm": lambda: nn.BatchNorm2d(layer.outputs, eps=EPSILON),
        "layer_norm": lambda: nn.LayerNorm(layer.outputs, eps=EPSILON),
        "attention": lambda: _Attention(layer.outputs, layer.heads),
        "sum": lambda: _Branches(layer),
        "concat": lambda: _Branches(layer),
    }
    return builders[layer.kind]()


def _weighted(layers: tuple[Layer, ...], modules: Any) -> Iterator[tuple[Layer, Any]]:
    """The layers that have weights of their own, each with its module."""
    for layer, module in zip(layers, modules, strict=True):
        if layer.branches:
            for branch, modules_of_branch in zip(layer.branches, module.branches, strict=True):
                yield from _weighted(branch, modules_of_branch)
        elif layer.kind == "attention":
            for part in "qkvo":
                yield Layer("dense", f"{layer.name}.{part}"), getattr(module, part)
        elif layer.shapes():
            yield layer, module


def _load(layer: Layer, module: Any, weights: dict[str, np.ndarray]) -> None:
    if layer.kind.endswith("_norm"):
        weight = weights[f"{layer.name}.scale"]
    else:
        kernel = channels_first(layer, weights[f"{layer.name}.kernel"])
        weight = kernel.T if layer.kind == "dense" else kernel.transpose(3, 2, 0, 1)
    module.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
    module.bias.copy_(torch.from_numpy(weights[f"{layer.name}.bias"]))
