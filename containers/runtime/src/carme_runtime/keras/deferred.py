"""BatchNormalization layers whose moving averages wait for the end of the step.

Each micro-batch has its own statistics. Those of the whole batch, which the moving averages get once a step,
are the sums over its micro-batches.
"""

# torch need not be installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from carme_runtime.keras.library import keras

__all__ = ["WholeBatch", "can_defer"]


def can_defer(layer: Any) -> bool:
    """Whether this is a layer that does nothing but normalise."""
    return type(layer) is keras.layers.BatchNormalization and not layer.renorm


class WholeBatch:
    """The statistics of a batch, from those of its micro-batches.

    Args:
        layer: Whose moving averages they are for.
    """

    def __init__(self, layer: Any) -> None:
        self._of = (layer,)  # see LayerCall
        self._clear()

    def _clear(self) -> None:
        self._count = 0.0
        self._sum: Any = 0.0
        self._squares: Any = 0.0

    @contextlib.contextmanager
    def noted(self) -> Iterator[Any]:
        """Note the statistics of a call of the layer, and leave its variables as they are."""
        layer = self._of[0]
        usual = layer._moments

        def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
            mean, variance = usual(inputs, mask)
            self._note(inputs, mask, mean.detach().double(), variance.detach().double())
            return mean, variance

        vars(layer)["_moments"] = moments
        try:
            with keras.StatelessScope(collect_losses=True) as scope:
                yield scope
        finally:
            del vars(layer)["_moments"]

    def _note(self, inputs: Any, mask: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
        count = inputs.numel() / mean.numel() if mask is None else float(mask.sum())
        self._count += count
        self._sum = self._sum + mean * count
        self._squares = self._squares + (variance + mean**2) * count

    def update(self) -> None:
        """Give the moving averages what was noted."""
        if not self._count:
            return
        layer = self._of[0]
        mean = self._sum / self._count
        variance = self._squares / self._count - mean**2
        for variable, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            variable.value.data.lerp_(new.to(variable.value.dtype), 1.0 - layer.momentum)
        self._clear()
