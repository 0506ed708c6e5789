"""Adds up over ranks what an optimizer gets, on each backend of Keras."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np

from carme_runtime import fusion
from carme_runtime.keras.library import keras
from carme_runtime.keras.world import World
from carme_runtime.logs import log

_BUCKET_BYTES = 8 << 20


class GraphSums:
    """Sums that are nodes of TensorFlow's graph, where there is one."""

    def __init__(self, world: World) -> None:
        self._tf: Any = import_module("tensorflow")
        self._world = world
        self._bucket_bytes = fusion.threshold(_BUCKET_BYTES)
        with eagerly():
            self.of_total = self._tf.Variable([0.0, 1.0], trainable=False, dtype="float64")

    def take(self, samples: int, total: int) -> None:
        """What runs next is over so many samples of a global batch of `total`."""
        self.of_total.assign([samples, total])

    def reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of the mean loss over the whole batch."""
        tf = self._tf
        whole = list(gradients)
        dense: dict[int, Any] = {}
        # Backpropagation makes the last ones first.
        for index in reversed([i for i, gradient in enumerate(gradients) if gradient is not None]):
            if isinstance(gradients[index], tf.IndexedSlices):
                whole[index] = self._gathered(gradients[index])
                continue
            dense[index] = tf.ensure_shape(gradients[index], variables[index].shape)
        part = self.of_total[0] / self.of_total[1]
        for number, bucket in enumerate(_buckets(dense, self._bucket_bytes, lambda t: t.dtype.size)):
            flat = tf.concat([tf.reshape(dense[index], [-1]) for index in bucket], 0)
            flat = tf.where(part > 0, flat * tf.cast(part, flat.dtype), tf.zeros_like(flat))
            parts = tf.split(self.sum(flat, f"gradients {number}"), [_count(dense[i]) for i in bucket])
            for index, reduced in zip(bucket, parts, strict=True):
                whole[index] = tf.reshape(reduced, dense[index].shape)
        return whole

    def _gathered(self, gradient: Any) -> Any:
        """The rows of an embedding's gradient from all ranks; the optimizer adds up those of one index."""
        tf = self._tf
        part = self.of_total[0] / self.of_total[1]

        def gather(values: np.ndarray, indices: np.ndarray, part: np.ndarray) -> list[np.ndarray]:
            own_rows = slice(None) if part > 0 else slice(0)
            scaled = (values[own_rows] * part).astype(values.dtype)
            rows = self._world.concatenate(scaled, "gradients of rows")
            numbers = self._world.concatenate(indices[own_rows].copy(), "rows with gradients")
            return [np.concatenate(rows), np.concatenate(numbers)]

        types = [gradient.values.dtype, gradient.indices.dtype]
        values, indices = tf.numpy_function(gather, [gradient.values, gradient.indices, part], types)
        values.set_shape([None, *gradient.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def sum(self, vector: Any, label: str) -> Any:
        """A node that adds up a vector over ranks."""

        def add(values: np.ndarray) -> np.ndarray:
            return self._world.add(np.array(values), label)

        whole = self._tf.numpy_function(add, [vector], vector.dtype)
        whole.set_shape(vector.shape)
        return whole


class TorchSums:
    """Sums of torch tensors, for loops in which the model's own hooks do not reduce."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bucket_bytes = fusion.threshold(_BUCKET_BYTES)
        self._part = 0.0

    def take(self, samples: int, total: int) -> None:
        """What runs next is over so many samples of a global batch of `total`."""
        self._part = samples / total

    def reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of the mean loss over the whole batch.

        A variable may have none on some ranks; where no rank has one, None stays.
        """
        import torch

        whole = list(gradients)
        # Behind each bucket's elements: for each variable whether there is a gradient.
        sums = {
            i: torch.zeros_like(v.value) if g is None else g.detach()
            for i, (g, v) in enumerate(zip(gradients, variables, strict=True))
        }
        for number, bucket in enumerate(_buckets(sums, self._bucket_bytes, lambda t: t.element_size())):
            flags = sums[bucket[0]].new_tensor([gradients[index] is not None for index in bucket])
            flat = torch.cat([*(sums[index].detach().reshape(-1) for index in bucket), flags])
            scaled = flat * self._part if self._part else torch.zeros_like(flat)
            summed = self._world.add(scaled.cpu(), f"gradients {number}").to(flat.device)
            *parts, found = summed.split([*(sums[index].numel() for index in bucket), len(bucket)])
            for index, reduced, has in zip(bucket, parts, found.tolist(), strict=True):
                whole[index] = reduced.reshape(sums[index].shape) if has else None
        return whole


def sums(world: World) -> GraphSums | TorchSums:
    """What the backend of Keras takes."""
    return GraphSums(world) if keras.backend.backend() == "tensorflow" else TorchSums(world)


def eagerly() -> AbstractContextManager[Any]:
    """What is done at once, also while TensorFlow makes a graph."""
    if keras.backend.backend() == "tensorflow":
        return import_module("tensorflow").init_scope()
    return nullcontext()


def _buckets(tensors: dict[int, Any], limit: int, width: Callable[[Any], int]) -> list[list[int]]:
    """Those that travel together: of one type, and not many more bytes than `limit`."""
    buckets: list[list[int]] = []
    filled = 0
    for index, tensor in tensors.items():
        if not buckets or filled >= limit or tensors[buckets[-1][0]].dtype != tensor.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += width(tensor) * _count(tensor)
    log.debug("Gradients are reduced in %d parts.", len(buckets))
    return buckets


def _count(tensor: Any) -> int:
    return int(np.prod(tuple(tensor.shape), dtype=np.int64))
