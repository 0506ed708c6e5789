"""What a network's first loss and its gradients must be, computed without any framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from carme_runtime.compare.layers import EPSILON, Layer
from carme_runtime.compare.networks import Network

if TYPE_CHECKING:
    import numpy as np

    Weights = dict[str, np.ndarray]
    Axes = tuple[int, ...]

#: The part of values that rounding in float32 may change in a network of a few layers without convolutions.
_KINK = 4e-6
#: The same in all others: twice the most that PyTorch changed in a ResNet-20 with images of 64x64, of
#: millions of values. One value on the wrong side moves a gradient by 0.1 % there.
_KINK_OF_DEEP = 16e-6
_SHALLOW = frozenset({"dense", "relu"})


def loss(network: Network, weights: Weights, inputs: np.ndarray, targets: np.ndarray) -> float:
    """The cross-entropy of one rank's share, in the mean over samples, and pixels where each has a target."""
    import numpy as np

    exact = {name: value.astype(np.float64) for name, value in weights.items()}
    return _cross_entropy(_forward(network.layers, exact, inputs.astype(np.float64)), targets)[0]


def gradients(
    network: Network, weights: Weights, inputs: np.ndarray, targets: np.ndarray
) -> tuple[Weights, Weights]:
    """Those of `loss` by the weights' names.

    Where an input of a ReLU is so close to 0, or two inputs of a maximum to each other, that rounding decides
    which side counts, frameworks may rightly differ.

    Returns:
        With one side for all of these, and with the other.
    """
    import numpy as np

    exact = {name: value.astype(np.float64) for name, value in weights.items()}

    def start(logits: np.ndarray) -> np.ndarray:
        return _cross_entropy(logits, targets)[1]

    kink = _KINK if all(layer.kind in _SHALLOW for layer in network.layers) else _KINK_OF_DEEP
    first = _Pass(exact, 1, kink)
    _backward(first, network.layers, inputs.astype(np.float64), start)
    if not first.has_kinks:
        return first.found, first.found
    second = _Pass(exact, -1, kink)
    _backward(second, network.layers, inputs.astype(np.float64), start)
    return first.found, second.found


def _cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss, and its gradient by the logits."""
    import numpy as np

    logits = logits - logits.max(axis=-1, keepdims=True)
    chosen = targets[..., None]
    sums = np.exp(logits).sum(axis=-1, keepdims=True)
    value = np.mean(np.log(sums) - np.take_along_axis(logits, chosen, -1))
    gradient = np.exp(logits) / sums
    np.put_along_axis(gradient, chosen, np.take_along_axis(gradient, chosen, -1) - 1, -1)
    return float(value), gradient / targets.size


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
        normal = _normal(layer, values)[0]
        return normal * weights[f"{layer.name}.scale"] + weights[f"{layer.name}.bias"]
    return _attend(layer, weights, values) if layer.kind == "attention" else values


def _dense(name: str, weights: Weights, values: np.ndarray) -> np.ndarray:
    return values @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]


def _normal(layer: Layer, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, Axes]:
    """Normalized values, the deviations that they were divided by, and over what these are."""
    import numpy as np

    axes: Axes = (-1,) if layer.kind == "layer_norm" else tuple(range(values.ndim - 1))
    deviations = np.sqrt(values.var(axes, keepdims=True) + EPSILON)
    return (values - values.mean(axes, keepdims=True)) / deviations, deviations, axes


def _attend(layer: Layer, weights: Weights, values: np.ndarray) -> np.ndarray:
    _, _, v, shares = _attention(layer, weights, values)
    return _dense(f"{layer.name}.o", weights, _joined(shares @ v))


def _attention(layer: Layer, weights: Weights, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Queries, keys and values of each head, and which share of each value a piece gets."""
    import numpy as np

    q, k, v = (_split(layer, _dense(f"{layer.name}.{part}", weights, values)) for part in "qkv")
    scores = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1]))
    return q, k, v, scores / scores.sum(axis=-1, keepdims=True)


def _split(layer: Layer, values: np.ndarray) -> np.ndarray:
    """(samples, pieces, channels) as (samples, heads, pieces, channels of a head)."""
    return values.reshape(*values.shape[:2], layer.heads, -1).swapaxes(1, 2)


def _joined(parts: np.ndarray) -> np.ndarray:
    """What `_split` got."""
    joined = parts.swapaxes(1, 2)
    return joined.reshape(*joined.shape[:2], -1)


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

    half = layer.padding
    padded = np.pad(values, ((0, 0), (half, half), (half, half), (0, 0)))
    yield from _parts(layer, padded)


def _parts(layer: Layer, padded: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """`_windows` of an image that has its edge of zeros; they are views of it."""
    size, stride = layer.size, layer.stride
    height, width = ((side - size) // stride * stride + 1 for side in padded.shape[1:3])
    for row in range(size):
        for column in range(size):
            yield row, column, padded[:, row : row + height : stride, column : column + width : stride]


@dataclass
class _Pass:
    """A backpropagation.

    Args:
        weights: Of the network.
        side: 1 or -1: which one of two values counts where rounding alone decides.
        kink: The part of values that rounding may change.
        found: The gradients by weights.
        has_kinks: Whether there are such values.
    """

    weights: Weights
    side: int
    kink: float
    found: Weights = field(default_factory=dict)
    has_kinks: bool = False

    def margin(self, values: np.ndarray) -> float:
        """How close to each other values are that rounding in float32 may order."""
        import numpy as np

        return self.kink * float(np.sqrt(np.mean(np.square(values))))


def _is_positive(run: _Pass, values: np.ndarray) -> np.ndarray:
    margin = run.margin(values)
    run.has_kinks |= bool(((abs(values) < margin) & (values != 0)).any())
    return (values > -margin) & (values != 0) if run.side > 0 else values > margin


def _backward(
    run: _Pass,
    layers: tuple[Layer, ...],
    values: np.ndarray,
    start: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Backpropagation.

    Only the inputs of `layers` are kept meanwhile: what is inside of branches is computed again, which needs
    less memory.

    Args:
        run: Gets the gradients by weights.
        layers: One after the other.
        values: Input of the first layer.
        start: Makes the gradient by the last layer's result of that result.

    Returns:
        The gradient by the input.
    """
    inputs: list[np.ndarray] = []
    for layer in layers:
        inputs.append(values)
        values = _forward((layer,), run.weights, values)
    gradient = start(values)
    for layer in reversed(layers):
        back = _back_of_branches if layer.branches else _back
        gradient = back(run, layer, inputs.pop(), gradient)
    return gradient


def _back_of_branches(run: _Pass, layer: Layer, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    import numpy as np

    total = np.zeros_like(values)
    widths: list[int] = []

    def start(result: np.ndarray) -> np.ndarray:
        if layer.kind != "concat":
            return gradient
        begin = sum(widths)
        widths.append(result.shape[-1])
        return gradient[..., begin : begin + widths[-1]]

    for branch in layer.branches:
        total += _backward(run, branch, values, start)
    return total


def _back(run: _Pass, layer: Layer, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    import numpy as np

    if layer.kind == "dense":
        return _back_of_dense(run, layer.name, values, gradient)
    if layer.kind == "conv":
        return _back_of_convolution(run, layer, values, gradient)
    if layer.kind == "relu":
        return gradient * _is_positive(run, values)
    if layer.kind == "pool":
        return _back_of_pool(run, layer, values, gradient)
    if layer.kind == "up":
        n, height, width, channels = values.shape
        return gradient.reshape(n, height, 2, width, 2, channels).sum(axis=(2, 4))
    if layer.kind == "flatten":
        return gradient.reshape(values.shape)
    if layer.kind == "mean":
        between = values.shape[1:-1]
        each = gradient.reshape(len(values), *(1 for _ in between), -1) / math.prod(between)
        return np.broadcast_to(each, values.shape)
    if layer.kind.endswith("_norm"):
        return _back_of_norm(run, layer, values, gradient)
    return _back_of_attention(run, layer, values, gradient) if layer.kind == "attention" else gradient


def _back_of_dense(run: _Pass, name: str, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    kernel = run.weights[f"{name}.kernel"]
    flat = gradient.reshape(-1, gradient.shape[-1])
    run.found[f"{name}.kernel"] = values.reshape(-1, values.shape[-1]).T @ flat
    run.found[f"{name}.bias"] = flat.sum(axis=0)
    return gradient @ kernel.T


def _back_of_convolution(run: _Pass, layer: Layer, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    import numpy as np

    kernel, half = run.weights[f"{layer.name}.kernel"], layer.padding
    of_kernel = np.zeros_like(kernel)
    flat = gradient.reshape(-1, gradient.shape[-1])
    n, height, width, channels = values.shape
    of_padded = np.zeros((n, height + 2 * half, width + 2 * half, channels))
    windows = zip(_windows(layer, values), _parts(layer, of_padded), strict=True)
    for (row, column, part), (_, _, of_part) in windows:
        of_kernel[row, column] = part.reshape(-1, channels).T @ flat
        of_part += gradient @ kernel[row, column].T
    run.found[f"{layer.name}.kernel"], run.found[f"{layer.name}.bias"] = of_kernel, flat.sum(axis=0)
    return of_padded[:, half : half + height, half : half + width]


def _back_of_pool(run: _Pass, layer: Layer, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Of values that rounding alone may order, the first one gets it, or the last one."""
    import numpy as np

    half = layer.padding
    n, height, width, channels = values.shape
    of_padded = np.zeros((n, height + 2 * half, width + 2 * half, channels))
    left, count = gradient.copy(), np.zeros(gradient.shape, np.int8)
    least = _apply(layer, {}, values) - run.margin(values)
    windows = list(zip(_windows(layer, values), _parts(layer, of_padded), strict=True))
    for (_, _, part), (_, _, of_part) in windows[:: run.side]:
        is_largest = part >= least
        of_part += left * is_largest
        left[is_largest] = 0
        count += is_largest & (part > 0)  # a ReLU before it stops those that are 0
    run.has_kinks |= bool((count > 1).any())
    return of_padded[:, half : half + height, half : half + width]


def _back_of_norm(run: _Pass, layer: Layer, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    normal, deviations, axes = _normal(layer, values)
    axes_before = tuple(range(values.ndim - 1))
    run.found[f"{layer.name}.scale"] = (gradient * normal).sum(axis=axes_before)
    run.found[f"{layer.name}.bias"] = gradient.sum(axis=axes_before)
    inside = gradient * run.weights[f"{layer.name}.scale"]
    common = inside.mean(axes, keepdims=True) + normal * (inside * normal).mean(axes, keepdims=True)
    return (inside - common) / deviations


def _back_of_attention(run: _Pass, layer: Layer, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    q, k, v, shares = _attention(layer, run.weights, values)
    of_mixed = _split(layer, _back_of_dense(run, f"{layer.name}.o", _joined(shares @ v), gradient))
    of_shares = of_mixed @ v.swapaxes(2, 3)
    of_scores = shares * (of_shares - (of_shares * shares).sum(axis=-1, keepdims=True))
    of_scores /= math.sqrt(q.shape[-1])
    parts = {
        "q": of_scores @ k,
        "k": of_scores.swapaxes(2, 3) @ q,
        "v": shares.swapaxes(2, 3) @ of_mixed,
    }
    each = (
        _back_of_dense(run, f"{layer.name}.{part}", values, _joined(blocks)) for part, blocks in parts.items()
    )
    return sum(each, 0 * values)
