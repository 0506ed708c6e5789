"""The layers of all networks of a comparison, the same in every framework.

Images are (samples, height, width, channels), kernels of convolutions (height, width, inputs, outputs), those
of dense layers (inputs, outputs). Who builds a network in a framework converts both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

EPSILON = 1e-5  # of all normalizations


@dataclass(frozen=True)
class Layer:
    """One layer.

    Args:
        kind: `dense`, `conv`, `relu`, `pool` (the largest of size x size, of values that are not negative),
            `up` (each pixel becomes 2x2), `flatten`, `mean` (over all but samples and channels), `pixels`
            (the last one of networks that judge each pixel), `batch_norm`, `layer_norm`, `attention`,
            `sum` and `concat` (of branches; `concat` joins their channels).
        name: Of its weights.
        inputs: Channels.
        outputs: Channels.
        size: Of a convolution's kernel, or of what is pooled.
        stride: Of a convolution, or of pooling.
        heads: Of attention.
        image: What the samples of a dense layer were before they were flattened.
        scale: Of a normalization, at the beginning.
        branches: Layers that all get this layer's input; a branch without layers is that input.
    """

    kind: str
    name: str = ""
    inputs: int = 0
    outputs: int = 0
    size: int = 1
    stride: int = 1
    heads: int = 1
    image: tuple[int, int, int] | None = None
    scale: float = 1.0
    branches: tuple[tuple[Layer, ...], ...] = ()

    @property
    def padding(self) -> int:
        """Pixels of 0 on each side of an image: with a stride of 1 and an odd size it keeps its own."""
        return (self.size - 1) // 2

    def leaves(self) -> Iterator[Layer]:
        """Itself, or the layers of its branches."""
        if not self.branches:
            yield self
        for branch in self.branches:
            for each in branch:
                yield from each.leaves()

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
        inside = [leaf for leaf in self.leaves() if leaf is not self]
        if self.kind == "attention":
            inside = [Layer("dense", f"{name}.{part}", channels, channels) for part in "qkvo"]
        return {key: shape for each in inside for key, shape in each.shapes().items()}


def channels_first(layer: Layer, kernel: np.ndarray) -> np.ndarray:
    """A dense layer's kernel for samples that were flattened with their channels first."""
    if not layer.image:
        return kernel
    return kernel.reshape(*layer.image, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)


def channels_last(layer: Layer, kernel: np.ndarray) -> np.ndarray:
    """What `channels_first` got."""
    if not layer.image:
        return kernel
    height, width, channels = layer.image
    return kernel.reshape(channels, height, width, -1).transpose(1, 2, 0, 3).reshape(kernel.shape)
