"""The layers of each network, for images of any size and with more or fewer channels than published.

Each design takes the side of the images in pixels, their channels, the number of classes, and `width`: by
which the channels of all layers between are multiplied.
"""

from __future__ import annotations

from carme_runtime.compare.layers import Layer

_HEADS = 4
_PLACE = 4  # numbers that say where a piece of an image is
_INCEPTIONS = {  # of GoogLeNet: 1x1; 3x3 and before it; 5x5 and before it; after pooling
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
_LAST_BEFORE_POOLING = ("3b", "4e")
_RESNET50 = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks of a stage, and their inner channels
_BLOCK_SCALE = 0.2  # what a block adds at first: with 1, fifty layers make rounding a difference of the loss
_UNET_DEPTH = 4


def pieces_of(side: int) -> int:
    """Into how many pieces a row of an image is cut: 4, or more of 16 pixels, as with a side of 224."""
    return max(4, side // 16) if side % 16 == 0 else 4


def piece_length(side: int, channels: int) -> int:
    """The numbers of a piece of an image, and those that say where it is."""
    return (side // pieces_of(side)) ** 2 * channels + _PLACE


def mlp(side: int, channels: int, classes: int, width: float, hidden: int = 1024) -> tuple[Layer, ...]:
    """Three dense layers."""
    wide = _scaled(hidden, width)
    return (
        Layer("dense", "d1", side * side * channels, wide), Layer("relu"),
        Layer("dense", "d2", wide, wide), Layer("relu"),
        Layer("dense", "out", wide, classes),
    )  # fmt: skip


def tiny(side: int, channels: int, classes: int, width: float) -> tuple[Layer, ...]:
    """The same with 64 channels."""
    return mlp(side, channels, classes, width, hidden=64)


def alexnet(side: int, channels: int, classes: int, width: float) -> tuple[Layer, ...]:
    """Five convolutions and three dense layers, as AlexNet has them."""
    first, second, third, dense = (_scaled(number, width) for number in (32, 64, 96, 512))
    image = (side // 8, side // 8, second)
    return (
        _conv("c1", channels, first, 5), Layer("relu"), _pool(2),
        _conv("c2", first, second, 5), Layer("relu"), _pool(2),
        _conv("c3", second, third, 3), Layer("relu"),
        _conv("c4", third, third, 3), Layer("relu"),
        _conv("c5", third, second, 3), Layer("relu"), _pool(2), Layer("flatten"),
        Layer("dense", "d1", image[0] * image[1] * second, dense, image=image), Layer("relu"),
        Layer("dense", "d2", dense, dense), Layer("relu"),
        Layer("dense", "out", dense, classes),
    )  # fmt: skip


def googlenet(side: int, channels: int, classes: int, width: float) -> tuple[Layer, ...]:
    """Nine inception modules; without dropout, local normalization and the two classifiers beside."""
    first, second = _scaled(64, width), _scaled(192, width)
    layers = [
        _conv("c1", channels, first, 7, 2), Layer("relu"), _pool(3, 2),
        _conv("c2", first, first, 1), Layer("relu"),
        _conv("c3", first, second, 3), Layer("relu"), _pool(3, 2),
    ]  # fmt: skip
    inputs = second
    for name, published in _INCEPTIONS.items():
        numbers = [_scaled(number, width) for number in published]
        layers.append(_inception(name, inputs, numbers))
        inputs = numbers[0] + numbers[2] + numbers[4] + numbers[5]
        if name in _LAST_BEFORE_POOLING:
            layers.append(_pool(3, 2))
    return (*layers, Layer("mean"), Layer("dense", "out", inputs, classes))


def _inception(name: str, inputs: int, numbers: list[int]) -> Layer:
    alone, before_three, three, before_five, five, pooled = numbers
    branches = (
        (_conv(f"{name}a", inputs, alone, 1), Layer("relu")),
        (
            _conv(f"{name}b", inputs, before_three, 1), Layer("relu"),
            _conv(f"{name}c", before_three, three, 3), Layer("relu"),
        ),
        (
            _conv(f"{name}d", inputs, before_five, 1), Layer("relu"),
            _conv(f"{name}e", before_five, five, 5), Layer("relu"),
        ),
        (_pool(3, 1), _conv(f"{name}f", inputs, pooled, 1), Layer("relu")),
    )  # fmt: skip
    return Layer("concat", branches=branches)


def resnet20(side: int, channels: int, classes: int, width: float) -> tuple[Layer, ...]:
    """Of He and others for small images: three stages of three blocks."""
    inputs = _scaled(16, width)
    layers = [_conv("c0", channels, inputs, 3), _batch_norm("n0", inputs), Layer("relu")]
    for stage, published in enumerate((16, 32, 64)):
        outputs = _scaled(published, width)
        for block in range(3):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            inner = (
                _conv(f"{name}c1", inputs, outputs, 3, stride), _batch_norm(f"{name}n1", outputs),
                Layer("relu"),
                _conv(f"{name}c2", outputs, outputs, 3), _batch_norm(f"{name}n2", outputs),
            )  # fmt: skip
            shortcut = (_conv(f"{name}c3", inputs, outputs, 1, 2),) if stride == 2 else ()
            layers += [Layer("sum", branches=(inner, shortcut)), Layer("relu")]
            inputs = outputs
    return (*layers, Layer("mean"), Layer("dense", "out", inputs, classes))


def resnet50(side: int, channels: int, classes: int, width: float) -> tuple[Layer, ...]:
    """Of He and others for large images, with the stride in the middle of a block."""
    inputs = _scaled(64, width)
    layers = [_conv("c0", channels, inputs, 7, 2), _batch_norm("n0", inputs), Layer("relu"), _pool(3, 2)]
    for stage, (blocks, published) in enumerate(_RESNET50):
        middle, outputs = _scaled(published, width), _scaled(4 * published, width)
        for block in range(blocks):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            inner = (
                _conv(f"{name}c1", inputs, middle, 1), _batch_norm(f"{name}n1", middle), Layer("relu"),
                _conv(f"{name}c2", middle, middle, 3, stride), _batch_norm(f"{name}n2", middle),
                Layer("relu"),
                _conv(f"{name}c3", middle, outputs, 1), _batch_norm(f"{name}n3", outputs, _BLOCK_SCALE),
            )  # fmt: skip
            shortcut = (_conv(f"{name}c4", inputs, outputs, 1, stride), _batch_norm(f"{name}n4", outputs))
            layers += [Layer("sum", branches=(inner, () if block else shortcut)), Layer("relu")]
            inputs = outputs
    return (*layers, Layer("mean"), Layer("dense", "out", inputs, classes))


def unet(side: int, channels: int, classes: int, width: float) -> tuple[Layer, ...]:
    """Four levels below the first; images grow again by repeated pixels and a convolution."""
    return (
        *_unet_level(0, channels, width),
        _conv("out", _scaled(64, width), classes, 1), Layer("pixels"),
    )  # fmt: skip


def _unet_level(depth: int, inputs: int, width: float) -> tuple[Layer, ...]:
    outputs, deeper = _scaled(64 << depth, width), _scaled(128 << depth, width)
    down = _conv_twice(f"l{depth}a", inputs, outputs)
    if depth == _UNET_DEPTH:
        return down
    below = (
        _pool(2), *_unet_level(depth + 1, outputs, width),
        Layer("up"), _conv(f"l{depth}u", deeper, outputs, 3), Layer("relu"),
    )  # fmt: skip
    beside = Layer("concat", branches=((), below))
    return (*down, beside, *_conv_twice(f"l{depth}b", 2 * outputs, outputs))


def _conv_twice(name: str, inputs: int, outputs: int) -> tuple[Layer, ...]:
    return (
        _conv(f"{name}1", inputs, outputs, 3), Layer("relu"),
        _conv(f"{name}2", outputs, outputs, 3), Layer("relu"),
    )  # fmt: skip


def transformer(side: int, channels: int, classes: int, width: float, blocks: int = 2) -> tuple[Layer, ...]:
    """For images as sequences of small pieces."""
    wide = _HEADS * _scaled(128 // _HEADS, width)
    layers = [Layer("dense", "in", piece_length(side, channels), wide)]
    for number in range(blocks):
        name = f"b{number}"
        attention = (
            Layer("layer_norm", f"{name}n1", outputs=wide),
            Layer("attention", f"{name}a", outputs=wide, heads=_HEADS),
        )
        dense = (
            Layer("layer_norm", f"{name}n2", outputs=wide),
            Layer("dense", f"{name}d1", wide, 4 * wide), Layer("relu"),
            Layer("dense", f"{name}d2", 4 * wide, wide),
        )  # fmt: skip
        layers += [Layer("sum", branches=(attention, ())), Layer("sum", branches=(dense, ()))]
    return (*layers, Layer("layer_norm", "n", outputs=wide), Layer("mean"),
            Layer("dense", "out", wide, classes))  # fmt: skip


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _conv(name: str, inputs: int, outputs: int, size: int, stride: int = 1) -> Layer:
    return Layer("conv", name, inputs, outputs, size, stride)


def _batch_norm(name: str, channels: int, scale: float = 1.0) -> Layer:
    return Layer("batch_norm", name, outputs=channels, scale=scale)


def _pool(size: int, stride: int = 2) -> Layer:
    return Layer("pool", size=size, stride=stride)
