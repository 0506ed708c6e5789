"""The networks as models of Keras 3, or of tf_keras."""

from typing import Any

import numpy as np

from carme_runtime.compare.layers import EPSILON, Layer
from carme_runtime.compare.tasks import Task


def build(task: Task, keras: Any, channels_first: bool = False) -> Any:
    """The network with the task's weights.

    Args:
        task: Its network and weights.
        keras: The module `keras` or `tf_keras`.
        channels_first: Whether images have their channels first, which PyTorch and GPUs prefer.
    """
    shape = task.network.shape
    if channels_first and len(shape) == 3:
        shape = (shape[2], *shape[:2])
    builder = _Builder(keras, channels_first)
    source = keras.Input(shape)
    model = keras.Model(source, builder.apply(task.network.layers, source))
    for layer, made in builder.weighted:
        made.set_weights(_converted(layer, task.weights, channels_first))
    return model


class _Builder:
    def __init__(self, keras: Any, channels_first: bool) -> None:
        self.layers = keras.layers
        self.axis = 1 if channels_first else -1
        self.channels_first = channels_first
        self.format = {"data_format": "channels_first" if channels_first else "channels_last"}
        self.weighted: list[tuple[Layer, Any]] = []

    def apply(self, layers: tuple[Layer, ...], values: Any) -> Any:
        for layer in layers:
            if layer.padding:
                values = self.layers.ZeroPadding2D(layer.padding, **self.format)(values)
            if layer.branches:
                join = self.layers.Concatenate(self.axis) if layer.kind == "concat" else self.layers.Add()
                values = join([self.apply(branch, values) for branch in layer.branches])
            elif layer.kind == "pixels":
                values = self.layers.Permute((2, 3, 1))(values) if self.channels_first else values
            elif layer.kind == "attention":
                values = self._make(layer)(values, values)
            elif layer.kind == "mean" and len(values.shape) == 4:
                values = self.layers.GlobalAveragePooling2D(**self.format)(values)
            else:
                values = self._make(layer)(values)
        return values

    def _make(self, layer: Layer) -> Any:
        kinds = self.layers
        made: dict[str, Any] = {
            "dense": lambda: kinds.Dense(layer.outputs),
            "conv": lambda: kinds.Conv2D(layer.outputs, layer.size, layer.stride, **self.format),
            "relu": kinds.ReLU,
            "pool": lambda: kinds.MaxPooling2D(layer.size, layer.stride, **self.format),
            "up": lambda: kinds.UpSampling2D(2, **self.format),
            "flatten": lambda: kinds.Flatten(data_format="channels_last"),
            "mean": kinds.GlobalAveragePooling1D,
            "batch_norm": lambda: kinds.BatchNormalization(self.axis, momentum=0.9, epsilon=EPSILON),
            "layer_norm": lambda: kinds.LayerNormalization(epsilon=EPSILON),
            "attention": lambda: kinds.MultiHeadAttention(layer.heads, layer.outputs // layer.heads),
        }
        result = made[layer.kind]()
        if layer.shapes():
            self.weighted.append((layer, result))
        return result


def _converted(layer: Layer, weights: dict[str, np.ndarray], channels_first: bool) -> list[np.ndarray]:
    """In the order and the shapes of Keras."""
    name = layer.name
    if layer.kind == "attention":
        width, heads = layer.outputs, layer.heads
        found: list[np.ndarray] = []
        for part in "qkv":
            found.append(weights[f"{name}.{part}.kernel"].reshape(width, heads, -1))
            found.append(weights[f"{name}.{part}.bias"].reshape(heads, -1))
        return [*found, weights[f"{name}.o.kernel"].reshape(heads, -1, width), weights[f"{name}.o.bias"]]
    if layer.kind.endswith("_norm"):
        found = [weights[f"{name}.scale"], weights[f"{name}.bias"]]
        zeros = np.zeros_like(found[0])
        return [*found, zeros, zeros + 1] if layer.kind == "batch_norm" else found
    kernel = weights[f"{name}.kernel"]
    if layer.image and channels_first:
        kernel = kernel.reshape(*layer.image, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
    return [kernel, weights[f"{name}.bias"]]
