"""Operators that change shapes, pick and place elements."""

import math
from typing import Any

import torch
from torch.nn import functional

from carme_runtime.onnx.conversion.table import (
    Node,
    axes_of,
    checks,
    integers,
    operator,
    refuse_others,
)


@operator("Concat")
def concat(node: Node, *values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values, node.get("axis", 1))


@operator("Reshape")
def reshape(node: Node, x: torch.Tensor, shape: torch.Tensor | None = None) -> torch.Tensor:
    sizes = integers(shape if shape is not None else node.get("shape"))
    if not node.get("allowzero", 0):
        sizes = [x.shape[place] if size == 0 else size for place, size in enumerate(sizes)]
    named, batch_size = node.batch
    if named != batch_size and sizes and sizes[0] == named:
        sizes[0] = batch_size
    return x.reshape(sizes)


@operator("Flatten")
def flatten(node: Node, x: torch.Tensor) -> torch.Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis  # it may be the rank: then all are rows
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose")
def transpose(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x.permute(node.get("perm", list(reversed(range(x.ndim)))))


@operator("Unsqueeze")
def unsqueeze(node: Node, x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
    chosen = axes_of(node, axes) or []
    rank = x.ndim + len(chosen)
    for axis in sorted(each % rank for each in chosen):
        x = x.unsqueeze(axis)
    return x


@operator("Squeeze")
def squeeze(node: Node, x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
    chosen = axes_of(node, axes)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


@operator("Shape")
def shape_of(node: Node, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(x.shape)[node.get("start", 0) : node.get("end")], dtype=torch.int64)


@operator("Size")
def size_of(node: Node, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.numel())


@operator("Slice")
def slice_of(node: Node, x: torch.Tensor, *bounds: Any) -> torch.Tensor:
    starts, ends, axes, steps = (*bounds, None, None, None, None)[:4]
    begin = integers(starts if starts is not None else node.get("starts"))
    end = integers(ends if ends is not None else node.get("ends"))
    chosen = integers(axes) if axes is not None else node.get("axes") or list(range(len(begin)))
    by = integers(steps) if steps is not None else [1] * len(begin)
    for low, high, axis, step in zip(begin, end, chosen, by, strict=True):
        places = range(x.shape[axis])[slice(low, high if high > -(1 << 60) else None, step)]
        if step > 0:
            picked = slice(places.start, max(places.stop, places.start), step)
            x = x[(slice(None),) * (axis % x.ndim) + (picked,)]
        else:
            x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))
    return x


@operator("Split")
def split(node: Node, x: torch.Tensor, sizes: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    axis = node.get("axis", 0)
    lengths = sizes if sizes is not None else node.get("split")
    if lengths is None:
        count = node.get("num_outputs", len(node.outputs))
        return x.split(-(-x.shape[axis] // count), axis)
    return x.split(integers(lengths), axis)


@operator("Gather")
def gather(node: Node, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    axis = node.get("axis", 0) % x.ndim
    flat = indices.reshape(-1).to(torch.int64)
    flat = torch.where(flat < 0, flat + x.shape[axis], flat)
    found = x.index_select(axis, flat)
    return found.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@operator("GatherElements")
def gather_elements(node: Node, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    axis = node.get("axis", 0)
    places = torch.where(indices < 0, indices + x.shape[axis], indices).to(torch.int64)
    return torch.gather(x, axis, places)


@operator("ScatterElements", "Scatter")
def scatter_elements(
    node: Node, x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    axis, reduction = node.get("axis", 0), node.get("reduction", "none")
    places = torch.where(indices < 0, indices + x.shape[axis], indices).to(torch.int64)
    if reduction == "none":
        return x.scatter(axis, places, updates)
    name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
    return x.scatter_reduce(axis, places, updates, name)


@operator("Expand")
def expand(node: Node, x: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(integers(shape))))


@operator("Tile")
def tile(node: Node, x: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
    return x.repeat(integers(repeats))


@operator("ConstantOfShape")
def constant_of_shape(node: Node, shape: torch.Tensor) -> torch.Tensor:
    value = node.get("value", torch.zeros(1))
    return value.reshape(()).expand(integers(shape)).clone()


@operator("Constant")
def constant(node: Node) -> torch.Tensor:
    value = next(iter(node.attributes.values()))
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


@operator("Range")
def range_of(node: Node, start: torch.Tensor, limit: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return torch.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


@checks("Pad")
def check_pad(node: Node) -> None:
    refuse_others(node, "mode", ("constant", "edge", "reflect", "wrap"), "constant")


@operator("Pad")
def pad(node: Node, x: torch.Tensor, pads: Any = None, value: Any = None, axes: Any = None) -> torch.Tensor:
    sizes = integers(pads if pads is not None else node.get("pads", node.get("paddings")))
    chosen = integers(axes) if axes is not None else list(range(x.ndim))
    by_axis = {axis % x.ndim: (sizes[k], sizes[k + len(chosen)]) for k, axis in enumerate(chosen)}
    mode = node.get("mode", "constant")
    if mode == "constant":
        fill = float(value) if value is not None else node.get("value", 0.0)
        flat = [size for axis in reversed(range(x.ndim)) for size in by_axis.get(axis, (0, 0))]
        return functional.pad(x, flat, value=fill)
    for axis, (before, after) in by_axis.items():
        if before or after:
            x = _extended(x, axis, before, after, mode)
    return x


def _extended(x: torch.Tensor, axis: int, before: int, after: int, mode: str) -> torch.Tensor:
    """Pad one axis with its edge, what lies beside it (reflect) or its other end (wrap), for any rank."""
    count = x.shape[axis]
    places = torch.arange(-before, count + after)
    if mode == "edge":
        places = places.clamp(0, count - 1)
    elif mode == "wrap":
        places = places % count
    else:
        places = places.abs()
        places = torch.where(places >= count, 2 * (count - 1) - places, places)
    return x.index_select(axis, places.to(x.device))
