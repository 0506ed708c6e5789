"""How shapes follow from those of the inputs, where these are smaller than the example's."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from carme_runtime.graph import Value
from carme_runtime.torch.traced import Traced


class InputShapes:
    """Of a traced model; its `variable_shapes` says whether inputs vary in more than samples."""

    def __init__(self, traced: Traced) -> None:
        self._variable, self._samples = traced.variable_shapes, traced.graph.samples
        inputs = [n for n in traced.nodes if n.op == "placeholder" and n.name not in traced.tensors]
        # By input; None: nothing says that a dimension is fixed.
        self._inputs = [tuple(n.meta["val"].shape) if "val" in n.meta else None for n in inputs]

    def fit(self, number: int, shape: Sequence[int], example: Sequence[int]) -> bool:
        """Whether an input may have this shape, whatever its number of samples."""
        if len(shape) != len(example):
            return False
        return all(
            size == most or (0 < size < most and self._varies(number, dimension))
            for dimension, (size, most) in enumerate(zip(shape, example, strict=True))
            if dimension
        )

    def _varies(self, number: int, dimension: int) -> bool:
        symbolic = self._inputs[number]
        return self._variable and (symbolic is None or not isinstance(symbolic[dimension], int))

    def of_mask(
        self, node: fx.Node, value: Value, batch: Sequence[torch.Tensor]
    ) -> tuple[list[int], list[int], int]:
        """Of a node's value: its shape, the dimensions that grow with the samples, and for how many it is.

        Args:
            node: Of the framework's graph.
            value: The same as it was with the example.
            batch: What the model is called with now.
        """
        symbolic = node.meta["val"].shape
        if not self._variable:
            return (
                list(value.shape),
                [d for d, size in enumerate(symbolic) if not isinstance(size, int)],
                (self._samples),
            )
        known: dict[Any, int] = {}
        of_samples: set[Any] = set()
        for shape, tensor in zip(self._inputs, batch, strict=True):
            for dimension, size in enumerate(shape or ()):
                if isinstance(size, int):
                    continue
                known[size.node.expr] = tensor.shape[dimension]
                of_samples |= size.node.expr.free_symbols if dimension == 0 else set()
        exprs = [None if isinstance(size, int) else size.node.expr for size in symbolic]
        found = [
            int(size) if expr is None else int(expr.subs(known))
            for size, expr in zip(symbolic, exprs, strict=True)
        ]
        growing = [d for d, expr in enumerate(exprs) if expr is not None and expr.free_symbols & of_samples]
        return found, growing, len(batch[0])
