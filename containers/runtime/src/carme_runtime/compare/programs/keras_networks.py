"""The networks as models of Keras 3, or of tf_keras."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from carme_runtime.compare.layers import EPSILON, Layer, channels_last
from carme_runtime.compare.layers import channels_first as to_channels_first
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
    for layer in _weighted(task):
        model.get_layer(layer.name).set_weights(_converted(layer, task.weights, channels_first))
    return model


def first_gradients(
    task: Task, model: Any, optimizer: Any, channels_first: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Of the velocities that SGD with momentum has after its first step: the gradients, times minus its rate.

    Args:
        task: Its network.
        model: As `build` made it.
        optimizer: Which made the step.
        channels_first: As it was built.

    Yields:
        By the names and in the shapes of the task's weights.
    """
    rate = task.network.rate
    trained = zip(model.trainable_variables, optimizer.momentums, strict=True)
    velocities = {id(variable): velocity for variable, velocity in trained}
    for layer in _weighted(task):
        variables = model.get_layer(layer.name).trainable_variables
        shapes = layer.shapes()  # in the order of Keras, too
        for (name, shape), variable in zip(shapes.items(), variables, strict=True):
            value = velocities[id(variable)].numpy().reshape(shape) / -rate
            is_turned = channels_first and len(shape) > 1
            yield name, channels_last(layer, value) if is_turned else value


def _weighted(task: Task) -> list[Layer]:
    """The layers that have weights; the model's have the same names."""
    leaves = (leaf for layer in task.network.layers for leaf in layer.leaves())
    return [leaf for leaf in leaves if leaf.shapes()]


class _Builder:
    def __init__(self, keras: Any, channels_first: bool) -> None:
        self.layers = keras.layers
        self.axis = 1 if channels_first else -1
        self.channels_first = channels_first
        self.format = {"data_format": "channels_first" if channels_first else "channels_last"}

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
        name = {"name": layer.name} if layer.shapes() else {}
        builders: dict[str, Any] = {
            "dense": lambda: kinds.Dense(layer.outputs, **name),
            "conv": lambda: kinds.Conv2D(layer.outputs, layer.size, layer.stride, **self.format, **name),
            "relu": kinds.ReLU,
            "pool": lambda: kinds.MaxPooling2D(layer.size, layer.stride, **self.format),
            "up": lambda: kinds.UpSampling2D(2, **self.format),
            "flatten": lambda: kinds.Flatten(data_format="channels_last"),
            "mean": kinds.GlobalAveragePooling1D,
            "batch_norm": lambda: kinds.BatchNormalization(self.axis, momentum=0.9, epsilon=EPSILON, **name),
            "layer_norm": lambda: kinds.LayerNormalization(epsilon=EPSILON, **name),
            "attention": lambda: kinds.MultiHeadAttention(layer.heads, layer.outputs // layer.heads, **name),
        }
        return builders[layer.kind]()


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
    return [to_channels_first(layer, kernel) if channels_first else kernel, weights[f"{name}.bias"]]
