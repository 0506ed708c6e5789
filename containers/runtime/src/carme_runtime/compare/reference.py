"""What a network's first loss must be, computed without any framework."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from carme_runtime.compare.layers import EPSILON, Layer
from carme_runtime.compare.networks import Network

if TYPE_CHECKING:
    import numpy as np

    Weights = dict[str, np.ndarray]


def loss(network: Network, weights: Weights, inputs: np.ndarray, targets: np.ndarray) -> float:
    """The cross-entropy of one rank's share, in the mean over samples, and pixels where each has a target."""
    import numpy as np

    exact = {name: value.astype(np.float64) for name, value in weights.items()}
    logits = _forward(network.layers, exact, inputs.astype(np.float64))
    logits = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return float(np.mean(np.log(np.exp(logits).sum(axis=-1)) - chosen))


def _forward(layers: tuple[Layer, ...], weights: Weights, values: np.ndarray) -> np.ndarray:
    for layer in layers:
        values = _join(layer, weights, values) if layer.branches else _apply(layer, weights, values)
    return values


def _join(layer: Layer, weights: Weights, values: np.ndarray) -> np.ndarray:
    import numpy as np

    parts = [_forward(branch, weights, values) for branch in layer.branches]
    return np.concatenate(parts, axis=-1) if layer.kind == "concat" else sum(parts[1:], parts[0])


def _apply(layer: Layer, weights: Weights, values: np.ndarray) -> np.ndarray:
    import numpy as np

    if layer.kind == "dense":
        return _dense(layer.name, weights, values)
    if layer.kind == "conv":
        return _convolve(layer, weights[f"{layer.name}.kernel"], values) + weights[f"{layer.name}.bias"]
    if layer.kind == "relu":
        return np.maximum(values, 0)
    if layer.kind == "pool":
        return np.maximum.reduce([part for _, _, part in _windows(layer, values)])
    if layer.kind == "up":
        return values.repeat(2, axis=1).repeat(2, axis=2)
    if layer.kind == "flatten":
        return values.reshape(len(values), -1)
    if layer.kind == "mean":
        return values.mean(axis=tuple(range(1, values.ndim - 1)))
    if layer.kind.endswith("_norm"):
        axes = -1 if layer.kind == "layer_norm" else tuple(range(values.ndim - 1))
        normal = (values - values.mean(axes, keepdims=True)) / np.sqrt(
            values.var(axes, keepdims=True) + EPSILON
        )
        return normal * weights[f"{layer.name}.scale"] + weights[f"{layer.name}.bias"]
    return _attend(layer, weights, values) if layer.kind == "attention" else values


def _dense(name: str, weights: Weights, values: np.ndarray) -> np.ndarray:
    return values @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]


def _attend(layer: Layer, weights: Weights, values: np.ndarray) -> np.ndarray:
    import numpy as np

    n, length, width = values.shape
    q, k, v = (
        _dense(f"{layer.name}.{part}", weights, values).reshape(n, length, layer.heads, -1).swapaxes(1, 2)
        for part in "qkv"
    )
    scores = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(width / layer.heads))
    mixed = scores / scores.sum(axis=-1, keepdims=True) @ v
    return _dense(f"{layer.name}.o", weights, mixed.swapaxes(1, 2).reshape(n, length, width))


def _convolve(layer: Layer, kernel: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One place of the kernel after the other: all windows at once would need many times the memory."""
    parts = (part @ kernel[row, column] for row, column, part in _windows(layer, values))
    total = next(parts)
    for part in parts:
        total += part
    return total


def _windows(layer: Layer, values: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """For each place of a window: its row, its column, and the pixels that it lies on."""
    import numpy as np

    half, size, stride = layer.padding, layer.size, layer.stride
    padded = np.pad(values, ((0, 0), (half, half), (half, half), (0, 0)))
    height, width = ((side + 2 * half - size) // stride * stride + 1 for side in values.shape[1:3])
    for row in range(size):
        for column in range(size):
            yield row, column, padded[:, row : row + height : stride, column : column + width : stride]
