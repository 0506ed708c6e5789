"""The networks, described once for all frameworks, and their weights.

Images are (samples, height, width, channels), kernels of convolutions (height, width, inputs, outputs), those
of dense layers (inputs, outputs). Who builds a network in a framework converts both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Weights = dict[str, np.ndarray]

CLASSES = 10
EPSILON = 1e-5  # of all normalizations
_OUT = 0.1  # by which weights of the last layer are smaller, so that no class is preferred at first


@dataclass(frozen=True)
class Layer:
    """One layer.

    Args:
        kind: `dense`, `conv`, `relu`, `pool` (the largest of 2x2), `flatten`, `mean` (over all but samples
            and channels), `batch_norm`, `layer_norm`, `attention`, `residual`.
        name: Of its weights.
        inputs: Channels.
        outputs: Channels.
        size: Of a convolution's kernel, whose padding is half of it.
        stride: Of a convolution.
        heads: Of attention.
        image: What the samples of a dense layer were before they were flattened.
        inner: Of `residual`: the layers whose result is added to its input.
        shortcut: Of `residual`: layers for its input.
    """

    kind: str
    name: str = ""
    inputs: int = 0
    outputs: int = 0
    size: int = 1
    stride: int = 1
    heads: int = 1
    image: tuple[int, int, int] | None = None
    inner: tuple[Layer, ...] = ()
    shortcut: tuple[Layer, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its weights, by name."""
        name, channels = self.name, self.outputs
        if self.kind == "dense":
            return {f"{name}.kernel": (self.inputs, channels), f"{name}.bias": (channels,)}
        if self.kind == "conv":
            kernel = (self.size, self.size, self.inputs, channels)
            return {f"{name}.kernel": kernel, f"{name}.bias": (channels,)}
        if self.kind.endswith("_norm"):
            return {f"{name}.scale": (channels,), f"{name}.bias": (channels,)}
        if self.kind == "attention":
            dense = [Layer("dense", f"{name}.{part}", channels, channels) for part in "qkvo"]
            return {key: shape for each in dense for key, shape in each.shapes().items()}
        return {key: shape for each in (*self.inner, *self.shortcut) for key, shape in each.shapes().items()}


@dataclass(frozen=True)
class Network:
    """A network for samples of one shape.

    Args:
        name: What options and results call it.
        title: What the report calls it.
        shape: Of a sample.
        layers: In their order.
        batch: Samples of a step over all ranks.
        rate: Of learning, so small that rounding does not grow beyond what equal work may differ by.
    """

    name: str
    title: str
    shape: tuple[int, ...]
    layers: tuple[Layer, ...]
    batch: int
    rate: float = 0.01

    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(math.prod(shape) for layer in self.layers for shape in layer.shapes().values())


def _mlp(width: int) -> tuple[Layer, ...]:
    return (
        Layer("dense", "d1", 64, width), Layer("relu"),
        Layer("dense", "d2", width, width), Layer("relu"),
        Layer("dense", "out", width, CLASSES),
    )  # fmt: skip


def _alexnet() -> tuple[Layer, ...]:
    """Five convolutions and three dense layers, as AlexNet has them."""
    return (
        Layer("conv", "c1", 1, 32, 5), Layer("relu"), Layer("pool"),
        Layer("conv", "c2", 32, 64, 5), Layer("relu"), Layer("pool"),
        Layer("conv", "c3", 64, 96, 3), Layer("relu"),
        Layer("conv", "c4", 96, 96, 3), Layer("relu"),
        Layer("conv", "c5", 96, 64, 3), Layer("relu"), Layer("pool"), Layer("flatten"),
        Layer("dense", "d1", 256, 512, image=(2, 2, 64)), Layer("relu"),
        Layer("dense", "d2", 512, 512), Layer("relu"),
        Layer("dense", "out", 512, CLASSES),
    )  # fmt: skip


def _resnet20() -> tuple[Layer, ...]:
    """Of He and others for small images: three stages of three blocks."""
    layers = [Layer("conv", "c0", 1, 16, 3), Layer("batch_norm", "n0", outputs=16), Layer("relu")]
    channels = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            inner = (
                Layer("conv", f"{name}c1", channels, width, 3, stride),
                Layer("batch_norm", f"{name}n1", outputs=width),
                Layer("relu"),
                Layer("conv", f"{name}c2", width, width, 3),
                Layer("batch_norm", f"{name}n2", outputs=width),
            )
            shortcut = (Layer("conv", f"{name}c3", channels, width, 1, 2),) if stride == 2 else ()
            layers += [Layer("residual", inner=inner, shortcut=shortcut), Layer("relu")]
            channels = width
    return (*layers, Layer("mean"), Layer("dense", "out", channels, CLASSES))


def _transformer(width: int = 128, blocks: int = 2) -> tuple[Layer, ...]:
    """For images as sequences of small pieces."""
    layers = [Layer("dense", "in", 8, width)]
    for number in range(blocks):
        name = f"b{number}"
        attention = (
            Layer("layer_norm", f"{name}n1", outputs=width),
            Layer("attention", f"{name}a", outputs=width, heads=4),
        )
        dense = (
            Layer("layer_norm", f"{name}n2", outputs=width),
            Layer("dense", f"{name}d1", width, 4 * width),
            Layer("relu"),
            Layer("dense", f"{name}d2", 4 * width, width),
        )
        layers += [Layer("residual", inner=attention), Layer("residual", inner=dense)]
    return (
        *layers,
        Layer("layer_norm", "n", outputs=width),
        Layer("mean"),
        Layer("dense", "out", width, CLASSES),
    )


NETWORKS = {
    each.name: each
    for each in (
        Network("mlp", "MLP of three layers", (64,), _mlp(1024), 128),
        Network("alexnet", "AlexNet-like network", (16, 16, 1), _alexnet(), 64),
        Network("resnet20", "ResNet-20", (16, 16, 1), _resnet20(), 32, 0.001),
        Network("transformer", "transformer of two blocks", (16, 8), _transformer(), 64),
        Network("tiny", "MLP for a quick look", (64,), _mlp(64), 32),
    )
}


def draw(network: Network, random: Any) -> Weights:
    """New weights, by NumPy's generator `random`: He's, smaller in the last layer; scales are 1, biases 0."""
    import numpy as np

    weights: Weights = {}
    for layer in network.layers:
        for name, shape in layer.shapes().items():
            if name.endswith(".kernel"):
                deviation = math.sqrt(2 / math.prod(shape[:-1]))
                deviation *= _OUT if name == "out.kernel" else 1
                weights[name] = (deviation * random.standard_normal(shape)).astype(np.float32)
            else:
                weights[name] = np.full(shape, 1.0 if name.endswith(".scale") else 0.0, np.float32)
    return weights


def loss(network: Network, weights: Weights, inputs: np.ndarray, targets: np.ndarray) -> float:
    """What the cross-entropy of one rank's share must be, computed without any framework."""
    import numpy as np

    exact = {name: value.astype(np.float64) for name, value in weights.items()}
    logits = _forward(network.layers, exact, inputs.astype(np.float64))
    logits = logits - logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(targets)), targets]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))


def _forward(layers: tuple[Layer, ...], weights: Weights, values: np.ndarray) -> np.ndarray:
    for layer in layers:
        if layer.kind == "residual":
            saved = _forward(layer.shortcut, weights, values)
            values = _forward(layer.inner, weights, values) + saved
        else:
            values = _apply(layer, weights, values)
    return values


def _apply(layer: Layer, weights: Weights, values: np.ndarray) -> np.ndarray:
    import numpy as np

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]

    if layer.kind == "dense":
        return dense(layer.name, values)
    if layer.kind == "conv":
        return (
            _convolve(values, weights[f"{layer.name}.kernel"], layer.stride) + weights[f"{layer.name}.bias"]
        )
    if layer.kind == "relu":
        return np.maximum(values, 0)
    if layer.kind == "pool":
        n, h, w, c = values.shape
        return values.reshape(n, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))
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
    assert layer.kind == "attention"
    n, length, width = values.shape
    q, k, v = (
        dense(f"{layer.name}.{part}", values).reshape(n, length, layer.heads, -1).swapaxes(1, 2)
        for part in "qkv"
    )
    scores = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(width / layer.heads))
    mixed = scores / scores.sum(axis=-1, keepdims=True) @ v
    return dense(f"{layer.name}.o", mixed.swapaxes(1, 2).reshape(n, length, width))


def _convolve(values: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    import numpy as np

    size, half = kernel.shape[0], kernel.shape[0] // 2
    padded = np.pad(values, ((0, 0), (half, half), (half, half), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))  # pyright: ignore[reportCallIssue, reportArgumentType]
    return np.tensordot(windows[:, ::stride, ::stride], kernel, axes=([4, 5, 3], [0, 1, 2]))
