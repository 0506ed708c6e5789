"""Convolutions, pooling, products, normalisation: what has weights or works on neighbours."""

from typing import Any

import torch
from torch.nn import functional

from carme_runtime.onnx.conversion.table import Node, checks, integers, operator, refuse_others
from carme_runtime.onnx.errors import OnnxError

_CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
_MAX = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}


def _pads(node: Node, x: torch.Tensor, kernel: list[int], strides: list[int], steps: list[int]) -> list[int]:
    """Elements before and after each axis: first all of before, then all of after."""
    auto_pad, rank = node.get("auto_pad", "NOTSET"), len(kernel)
    if auto_pad in ("NOTSET", ""):
        return list(node.get("pads", [0] * 2 * rank))
    if auto_pad == "VALID":
        return [0] * 2 * rank
    before, after = [], []
    for size, width, stride, step in zip(x.shape[2:], kernel, strides, steps, strict=True):
        all_of_it = max((-(-size // stride) - 1) * stride + (width - 1) * step + 1 - size, 0)
        less, more = all_of_it // 2, all_of_it - all_of_it // 2
        before.append(less if auto_pad == "SAME_UPPER" else more)
        after.append(more if auto_pad == "SAME_UPPER" else less)
    return before + after


def _padded(x: torch.Tensor, pads: list[int], value: float = 0.0) -> torch.Tensor:
    rank = len(pads) // 2
    flat = [size for axis in reversed(range(rank)) for size in (pads[axis], pads[axis + rank])]
    return functional.pad(x, flat, value=value) if any(pads) else x


def _geometry(node: Node, kernel: list[int]) -> tuple[list[int], list[int]]:
    ones = [1] * len(kernel)
    return list(node.get("strides", ones)), list(node.get("dilations", ones))


@operator("Conv")
def conv(node: Node, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    kernel = list(weight.shape[2:])
    strides, steps = _geometry(node, kernel)
    pads, rank = _pads(node, x, kernel, strides, steps), len(kernel)
    padding: Any = pads[:rank]
    if pads[:rank] != pads[rank:]:
        x, padding = _padded(x, pads), 0
    return _CONV[rank](x, weight, bias, strides, padding, steps, node.get("group", 1))


@operator("ConvTranspose")
def conv_transpose(node: Node, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    kernel = list(weight.shape[2:])
    strides, steps = _geometry(node, kernel)
    rank, extra = len(kernel), list(node.get("output_padding", [0] * len(kernel)))
    whole = [
        (size - 1) * stride + (width - 1) * step + 1 + more
        for size, stride, width, step, more in zip(x.shape[2:], strides, kernel, steps, extra, strict=True)
    ]
    pads = list(node.get("pads", [0] * 2 * rank))
    auto_pad = node.get("auto_pad", "NOTSET")
    wanted = node.get("output_shape")
    if wanted is not None or auto_pad.startswith("SAME"):
        sizes = wanted or [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
        cut = [max(all_of_it - size, 0) for all_of_it, size in zip(whole, sizes, strict=True)]
        less, more = [each // 2 for each in cut], [each - each // 2 for each in cut]
        pads = less + more if auto_pad == "SAME_UPPER" else more + less
    result = _TRANSPOSED[rank](x, weight, bias, strides, 0, extra, node.get("group", 1), steps)
    picked = tuple(slice(pads[k], result.shape[2 + k] - pads[k + rank]) for k in range(rank))
    return result[(slice(None), slice(None), *picked)]


@operator("MaxPool")
def max_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    kernel = list(node.get("kernel_shape"))
    if len(node.outputs) > 1:
        raise OnnxError(f"Node {node.name} asks MaxPool for indices.", "Export the model without them.")
    strides, steps = _geometry(node, kernel)
    pads = _ceiled(node, x, kernel, strides, steps)
    return _MAX[len(kernel)](_padded(x, pads, float("-inf")), kernel, strides, 0, steps)


def _ceiled(
    node: Node, x: torch.Tensor, kernel: list[int], strides: list[int], steps: list[int]
) -> list[int]:
    """Pads with what `ceil_mode` adds at the end, whose window must begin within input or padding before."""
    pads, rank = _pads(node, x, kernel, strides, steps), len(kernel)
    if not node.get("ceil_mode", 0):
        return pads
    for k in range(rank):
        size = x.shape[2 + k] + pads[k] + pads[k + rank]
        window = (kernel[k] - 1) * steps[k] + 1
        count = -(-(size - window) // strides[k]) + 1
        if (count - 1) * strides[k] >= x.shape[2 + k] + pads[k]:
            count -= 1
        pads[k + rank] += max((count - 1) * strides[k] + window - size, 0)
    return pads


@operator("AveragePool")
def average_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    kernel = list(node.get("kernel_shape"))
    strides, steps = _geometry(node, kernel)
    stated, pads = _pads(node, x, kernel, strides, steps), _ceiled(node, x, kernel, strides, steps)
    counted = torch.ones_like(x[:1, :1])
    if node.get("count_include_pad", 0):
        counted = _padded(counted, stated, 1.0)
        beyond = [after - before for before, after in zip(stated, pads, strict=True)]
        counted = _padded(counted, beyond)
    else:
        counted = _padded(counted, pads)
    return _sums(_padded(x, pads), kernel, strides, steps) / _sums(counted, kernel, strides, steps)


def _sums(x: torch.Tensor, kernel: list[int], strides: list[int], steps: list[int]) -> torch.Tensor:
    for axis, (width, stride, step) in enumerate(zip(kernel, strides, steps, strict=True), start=2):
        window = (width - 1) * step + 1
        x = x.unfold(axis, window, stride)[..., ::step].sum(-1)
    return x


@operator("GlobalAveragePool")
def global_average_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


@operator("LRN")
def local_response(node: Node, x: torch.Tensor) -> torch.Tensor:
    size = node.get("size")
    alpha, beta, bias = node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    squares = x.square().transpose(1, -1)
    squares = functional.pad(squares, ((size - 1) // 2, size - 1 - (size - 1) // 2))
    sums = squares.unfold(-1, size, 1).sum(-1).transpose(1, -1)
    return x / (bias + alpha / size * sums) ** beta


@operator("Gemm")
def gemm(node: Node, a: torch.Tensor, b: torch.Tensor, c: Any = None) -> torch.Tensor:
    a = a.t() if node.get("transA", 0) else a
    b = b.t() if node.get("transB", 0) else b
    product = node.get("alpha", 1.0) * (a @ b)
    return product if c is None else product + node.get("beta", 1.0) * c


@operator("MatMul")
def matmul(node: Node, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@operator("Einsum")
def einsum(node: Node, *values: torch.Tensor) -> torch.Tensor:
    return torch.einsum(node.get("equation"), *values)


@operator("Softmax", "LogSoftmax")
def softmax(node: Node, x: torch.Tensor) -> torch.Tensor:
    function = functional.softmax if node.kind == "Softmax" else functional.log_softmax
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    axis = node.get("axis", 1) % x.ndim  # older opsets take all from the axis on together
    return function(x.flatten(axis), -1).reshape(x.shape)


@operator("Dropout")
def dropout(node: Node, x: torch.Tensor, ratio: Any = None, training: Any = None) -> Any:
    share = float(ratio) if ratio is not None else node.get("ratio", 0.5)
    if len(node.outputs) < 2:
        return functional.dropout(x, share, node.training)
    chosen = torch.rand_like(x) >= share if node.training else torch.ones_like(x, dtype=torch.bool)
    result = torch.where(chosen, x / (1 - share), 0.0) if node.training and share < 1 else x * chosen
    return result, chosen if node.opset >= 10 else chosen.to(x.dtype)


@operator("BatchNormalization")
def batch_normalization(
    node: Node,
    x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
) -> torch.Tensor:
    """In training the statistics are the batch's, and `mean` and `variance` follow them in place."""
    momentum, epsilon = 1 - node.get("momentum", 0.9), node.get("epsilon", 1e-5)
    return functional.batch_norm(x, mean, variance, scale, bias, node.training, momentum, epsilon)


@operator("LayerNormalization")
def layer_normalization(node: Node, x: torch.Tensor, scale: torch.Tensor, bias: Any = None) -> torch.Tensor:
    shape = x.shape[node.get("axis", -1) % x.ndim :]
    weight = scale.expand(shape)
    return functional.layer_norm(
        x, shape, weight, None if bias is None else bias.expand(shape), node.get("epsilon", 1e-5)
    )


@operator("InstanceNormalization")
def instance_normalization(
    node: Node, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return functional.instance_norm(x, None, None, scale, bias, eps=node.get("epsilon", 1e-5))


_PLACES = (
    "align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel",
    "tf_half_pixel_for_nn",
)  # fmt: skip


@checks("Resize", "Upsample")
def check_resize(node: Node) -> None:
    refuse_others(node, "mode", ("nearest", "linear"), "nearest")
    refuse_others(node, "coordinate_transformation_mode", _PLACES, "half_pixel")
    if node.get("antialias", 0):
        raise OnnxError(
            f"Node {node.name} is a Resize with antialias, which cannot be trained.", "Export it without."
        )


@operator("Resize", "Upsample")
def resize(node: Node, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
    old = node.kind == "Upsample" or node.opset < 11
    scales = node.get("scales") if not inputs else inputs[0] if old else (*inputs, None, None)[1]
    sizes = inputs[2] if len(inputs) > 2 and inputs[2] is not None else None
    axes = [axis % x.ndim for axis in node.get("axes") or range(x.ndim)]
    if sizes is not None:
        wanted = integers(sizes)
        named = [size / x.shape[axis] for size, axis in zip(wanted, axes, strict=True)]
        policy = node.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            named = [min(named) if policy == "not_larger" else max(named)] * len(axes)
            wanted = [int(x.shape[axis] * factor + 0.5) for axis, factor in zip(axes, named, strict=True)]
    else:
        named = scales.tolist() if isinstance(scales, torch.Tensor) else list(scales or [])
        wanted = [int(x.shape[axis] * factor) for axis, factor in zip(axes, named, strict=True)]
    places = "asymmetric" if old else node.get("coordinate_transformation_mode", "half_pixel")
    rounding = "floor" if old else node.get("nearest_mode", "round_prefer_floor")
    for axis, size, factor in zip(axes, wanted, named, strict=True):
        if size != x.shape[axis] or factor != 1:
            x = _resized(x, axis, size, factor, node.get("mode", "nearest"), places, rounding)
    return x


def _source(count: int, size: int, factor: float, places: str) -> torch.Tensor:
    """Where each element of a resized axis lies in the one before, as ONNX's Resize says."""
    target = torch.arange(size, dtype=torch.float32)
    if places == "align_corners":
        return target * (count - 1) / max(size - 1, 1)
    if places == "asymmetric":
        return target / factor
    if places == "pytorch_half_pixel" and size == 1:
        return torch.zeros(1)
    if places == "tf_half_pixel_for_nn":
        return (target + 0.5) / factor
    middle = 0.0
    if places == "half_pixel_symmetric":
        middle = count / 2 * (1 - size / (count * factor))
    return middle + (target + 0.5) / factor - 0.5


def _resized(
    x: torch.Tensor, axis: int, size: int, factor: float, mode: str, places: str, rounding: str
) -> torch.Tensor:
    """One axis after the other: nearest and linear interpolation are separable."""
    count = x.shape[axis]
    source = _source(count, size, factor, places)
    if mode == "nearest":
        rounded = {
            "floor": torch.floor,
            "ceil": torch.ceil,
            "round_prefer_floor": lambda value: torch.ceil(value - 0.5),
            "round_prefer_ceil": lambda value: torch.floor(value + 0.5),
        }[rounding](source)
        return x.index_select(axis, rounded.clamp(0, count - 1).to(torch.int64).to(x.device))
    source = source.clamp(0, count - 1)
    low = source.floor()
    share = (source - low).to(x.device).reshape([-1 if k == axis else 1 for k in range(x.ndim)])
    first = x.index_select(axis, low.to(torch.int64).to(x.device))
    second = x.index_select(axis, (low + 1).clamp(max=count - 1).to(torch.int64).to(x.device))
    return first + share * (second - first)
