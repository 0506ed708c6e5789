"""The networks, described once for all frameworks, and their weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carme_runtime.compare import designs
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.layers import Layer

if TYPE_CHECKING:
    import numpy as np

    Weights = dict[str, np.ndarray]

_OUT = 0.1  # by which weights of the last layer are smaller, so that no class is preferred at first
_PIXEL_CLASSES = 2  # of an object, or not
MOST_SIDE, MOST_WIDTH = 1024, 8.0


@dataclass(frozen=True)
class Network:
    """A network for samples of one shape.

    Args:
        name: What options and results call it.
        design: Makes its layers.
        title: What the report calls it.
        batch: Samples of a step over all ranks.
        rate: Of learning, so small that rounding does not grow beyond what equal work may differ by.
        side: Of the images, in pixels.
        multiple: Of how many pixels the side must be.
        channels: Of the images.
        classes: Between which it chooses.
        width: By which the channels of its layers are multiplied.
        sample: How it takes an image: as `image`, `flat`, or in `pieces`.
        judges_pixels: Whether it chooses for each pixel, whether that is of an object.
    """

    name: str
    design: Callable[[int, int, int, float], tuple[Layer, ...]]
    title: str
    batch: int
    rate: float = 0.01
    side: int = 8
    multiple: int = 8
    channels: int = 1
    classes: int = 10
    width: float = 1.0
    sample: str = "image"
    judges_pixels: bool = False

    @property
    def full_title(self) -> str:
        """Its title, and by how much it has more or fewer channels than the one of that name."""
        return self.title + (f", channels x {self.width:g}" if self.width != 1 else "")

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """In their order."""
        return self.design(self.side, self.channels, self.classes, self.width)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample."""
        if self.sample == "flat":
            return (self.side * self.side * self.channels,)
        if self.sample == "pieces":
            return (designs.pieces_of(self.side) ** 2, designs.piece_length(self.side, self.channels))
        return (self.side, self.side, self.channels)

    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(math.prod(shape) for layer in self.layers for shape in layer.shapes().values())

    def sized(self, side: int | None, channels: int, classes: int, width: float | None) -> Network:
        """The same network for other images, or with more or fewer channels; None: its own.

        Raises:
            CompareError: It cannot take images of this side.
        """
        side, width = side or self.side, width or self.width
        if side % self.multiple or not 0 < side <= MOST_SIDE:
            raise CompareError(
                f"The network '{self.name}' takes no images with a side of {side} pixels.",
                f"Use --size with a multiple of {self.multiple}, up to {MOST_SIDE}.",
            )
        classes = _PIXEL_CLASSES if self.judges_pixels else classes
        return dataclasses.replace(self, side=side, channels=channels, classes=classes, width=width)


#: Those that are published for large images have fewer channels here, so that every machine trains them.
NETWORKS = {
    each.name: each
    for each in (
        Network("mlp", designs.mlp, "MLP of three layers", 128, sample="flat"),
        Network("alexnet", designs.alexnet, "AlexNet-like network", 64, side=16),
        Network(
            "googlenet", designs.googlenet, "GoogLeNet-like network", 32, 0.003, side=64, multiple=32,
            width=0.25,
        ),
        Network("resnet20", designs.resnet20, "ResNet-20", 32, 0.001, side=16),
        Network(
            "resnet50", designs.resnet50, "ResNet-50", 32, 0.001, side=64, multiple=32, width=0.25
        ),
        Network(
            "unet", designs.unet, "U-Net", 32, side=32, multiple=16, classes=_PIXEL_CLASSES, width=0.125,
            judges_pixels=True,
        ),
        Network("transformer", designs.transformer, "transformer of two blocks", 64, sample="pieces"),
        Network("tiny", designs.tiny, "MLP for a quick look", 32, sample="flat"),
    )
}  # fmt: skip
#: What `all` stands for.
ALL_NETWORKS = tuple(name for name in NETWORKS if name != "tiny")


def draw(network: Network, random: Any) -> Weights:
    """New weights, by NumPy's generator `random`: He's, smaller in the last layer; biases are 0."""
    import numpy as np

    weights: Weights = {}
    for leaf in (each for layer in network.layers for each in layer.leaves()):
        for name, shape in leaf.shapes().items():
            if name.endswith(".kernel"):
                deviation = math.sqrt(2 / math.prod(shape[:-1]))
                deviation *= _OUT if name == "out.kernel" else 1
                weights[name] = (deviation * random.standard_normal(shape)).astype(np.float32)
            else:
                weights[name] = np.full(shape, leaf.scale if name.endswith(".scale") else 0.0, np.float32)
    return weights
